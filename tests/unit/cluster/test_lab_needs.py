"""Missing requirements of the lab, and their errors."""

from __future__ import annotations

import os

import pytest

from echelon.cluster.lab import needs
from echelon.cluster.lab.lab import Lab
from echelon.cluster.lab.spec import read_lab
from echelon.cluster.lab.state import maker, started_at
from echelon.errors import LabError


def test_without_root_the_error_names_options_that_need_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "missing", lambda: ["root"])
    with pytest.raises(LabError, match="the lab needs root") as caught:
        Lab.up(read_lab("two-sites"), "some run")
    assert caught.value.where == "lab two-sites"
    assert caught.value.fix == "run as root, or use --speed and --delay, which need no root"


def test_an_ordinary_user_lacks_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in needs.missing()


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "tool", lambda name: None if name == "tc" else f"/bin/{name}")
    assert "the command tc (package iproute2)" in needs.missing()


def test_a_kernel_without_cpu_groups_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "find_controller", lambda: None)
    assert any("CPU quotas" in lack for lack in needs.missing())


def test_a_process_is_distinguished_from_a_later_one_with_the_same_pid() -> None:
    pid, started = maker()
    assert pid == os.getpid()
    assert started > 0
    assert started_at(pid) == started
    assert started_at(1) != started
    assert started_at(2**22 + 1) == 0
