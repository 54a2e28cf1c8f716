"""How many workers have room on Ray's nodes, which GPUs they see, and what is said without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError, LaunchError
from echelon.start.agents.callback import Invitation
from echelon.start.engines import sweeper
from echelon.start.engines.ray_job import reason_of, with_devices
from echelon.start.launcher import LAUNCHERS, Wanted
from echelon.start.launchers.ray import read_runtime_env, slots

WANTED = Wanted(workers=2, hosts=[], timeout_s=1.0, env={})


@pytest.mark.parametrize(
    ("each", "room"),
    [
        ({"CPU": 1.0}, 6),
        ({"CPU": 3.0}, 1),
        ({"CPU": 0.1}, 60),
        ({"CPU": 1.0, "GPU": 1.0}, 2),
        ({"CPU": 2.0, "GPU": 1.0}, 2),
        ({"GPU": 3.0}, 0),
    ],
)
def test_room_is_counted_node_by_node(each, room):
    assert slots([{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}], each) == room


@given(st.lists(st.integers(0, 64), max_size=5), st.sampled_from([0.25, 0.5, 1.0, 2.0, 7.0]))
def test_workers_that_have_room_fit(cpus, each):
    for count in cpus:
        assert slots([{"CPU": float(count)}], {"CPU": each}) * each <= count
    assert slots([{"CPU": float(count)} for count in cpus], {"CPU": each}) <= sum(cpus) / each


def test_workers_see_all_gpus_of_the_run_on_their_node():
    invitation = Invitation(addresses=[], port=1, token=b"", network="", timeout_s=1, env={"A": "1"})
    found = with_devices([invitation] * 3, [("x", "2"), ("y", "0"), ("x", "0")])
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in found] == ["2,0", "0", "2,0"]
    assert all(one.env["A"] == "1" for one in found)


def test_reason_is_the_cause_rather_than_the_engines_words():
    error = RuntimeError("ray::host() failed:\n  a long story")
    assert reason_of(error) == "RuntimeError: ray::host() failed: a long story"
    error.cause = ModuleNotFoundError("No module named 'echelon'")
    assert reason_of(error) == "ModuleNotFoundError: No module named 'echelon'"


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match="Ray cannot be imported") as raised:
        LAUNCHERS.build("ray").connect(WANTED)
    assert "echelon[ray]" in raised.value.fix


@pytest.mark.parametrize("options", ["cpus=0", "cpus=-1", "gpus=-1"])
def test_worker_that_needs_nothing_is_refused(options):
    with pytest.raises(ConfigError, match="a worker needs a CPU or a GPU"):
        LAUNCHERS.build(f"ray({options})")


def test_runtime_environment_is_a_file_or_a_text(tmp_path):
    pytest.importorskip("yaml", reason='yaml is not installed: pip install "echelon[ray]"')
    (tmp_path / "env.yaml").write_text("pip: [one]\n")
    assert read_runtime_env(str(tmp_path / "env.yaml")) == {"pip": ["one"]}
    assert read_runtime_env('{"pip": ["one"]}') == {"pip": ["one"]}
    assert read_runtime_env("") is None
    for wrong in ("nowhere.yaml", "{"):
        with pytest.raises(ConfigError, match="runtime_env"):
            read_runtime_env(wrong)


def test_sweeper_ends_rays_processes_and_no_others_when_its_input_is_closed(tmp_path):
    """A process of Ray's is known by its program and the folder on its command line."""
    folder = tmp_path / "session"
    folder.mkdir()
    (folder / "log").touch()
    waiting = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    rays = subprocess.Popen(
        [*waiting, "/somewhere/ray/raylet", f"--log={folder}/log"], stdin=subprocess.PIPE
    )
    users = subprocess.Popen([*waiting, f"{folder}/log"], stdin=subprocess.PIPE)
    elsewhere = subprocess.Popen(
        [*waiting, "/somewhere/ray/raylet", "--log=/tmp/log"], stdin=subprocess.PIPE
    )
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", sweeper.__file__, str(folder)],
        stdin=subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        assert keeper.stdin is not None
        assert rays.poll() is None
        keeper.stdin.close()
        assert keeper.wait(timeout=60) == 0
        assert rays.wait(timeout=60) == -9
        assert (users.poll(), elsewhere.poll()) == (None, None)
        assert not Path(folder).exists()
    finally:
        for process in (rays, users, elsewhere, keeper):
            process.kill()
            process.communicate() if process.stdin and not process.stdin.closed else process.wait()
