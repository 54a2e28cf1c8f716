"""The command line, called as the `echelon` program calls it, in this process and in an empty folder."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from echelon.cli import main


@dataclass(frozen=True)
class Ended:
    """What a command printed, and the exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def echelon(monkeypatch, capfd, tmp_path) -> Callable[..., Ended]:
    """`echelon("list", "model")`: that command, at 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")

    def call(*args: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["echelon", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return call


_CLUSTER = """\
known = "written by hand"
[[node]]
name = "east"
count = 3
site = "east"
link = "1gbit"
[[node]]
name = "old"
site = "west"
speed = 0.03
link = "100mbit"
[[uplink]]
between = ["east", "west"]
rate = "10mbit"
latency = "5ms"
[job]
name = "lenet"
batch = 96
fixed = "2ms"
per_sample = "0.5ms"
memory = "200MiB"
[[job.layer]]
name = "fc"
gradients = "400KiB"
"""


@pytest.fixture
def cluster_text() -> str:
    """A cluster file: three equal nodes, an old one behind a slow uplink, and a job."""
    return _CLUSTER


@pytest.fixture
def cluster(tmp_path) -> str:
    """The path of that file."""
    file = tmp_path / "cluster.toml"
    file.write_text(_CLUSTER)
    return str(file)
