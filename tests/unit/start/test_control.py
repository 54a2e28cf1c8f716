"""What a command is told that asks the launcher of a run."""

from __future__ import annotations

import os
import socket
import time

import msgspec
import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.errors import LaunchError
from echelon.observe.events import LAUNCHER, RunEnded
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import PlanRequest, make_plan
from echelon.start.control import ControlAddress
from echelon.start.control_client import ControlClient
from echelon.start.further import ScriptDigest, why_nobody_joins


@pytest.fixture
def folder(tmp_path):
    found = RunFolder.create(tmp_path / "runs", "train")
    found.config.write_text("[run]\nmin_workers = 2\n")
    return found


def refusal(folder):
    with pytest.raises(LaunchError) as error:
        ControlClient(folder)
    return error.value


def test_a_run_that_has_ended_says_so(folder):
    recorder = Recorder(folder.events_of(LAUNCHER))
    recorder.emit(RunEnded(t=time.time(), rank=LAUNCHER, outcome="completed"))
    recorder.close()
    assert refusal(folder).message == f"run {folder.name} has ended"


def test_a_run_without_min_workers_is_named(folder):
    folder.config.write_text("[run]\nworkers = 4\n")
    assert "without --min-workers" in refusal(folder).message


def test_another_machine_is_told_where_the_run_is(folder):
    address = ControlAddress(host="elsewhere", port=1, token="t")
    folder.control.write_bytes(msgspec.json.encode(address))
    found = refusal(folder)
    assert (
        found.message == f"run {folder.name} was started on elsewhere, and this is {socket.gethostname()}"
    )
    assert "echelon invite" in found.fix


def test_a_launcher_that_was_killed_is_said(folder):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    address = ControlAddress(host=socket.gethostname(), port=port, token="t")
    folder.control.write_bytes(msgspec.json.encode(address))
    assert "does not answer" in refusal(folder).message


def test_joining_another_machines_run_needs_a_token_that_can_be_read(tmp_path):
    (tmp_path / "token").write_text("junk\n")
    for file, said in (("token", "this is no token"), ("nothing", "the token cannot be read from")):
        result = CliRunner().invoke(app, ["join", "gpu-a:29400", "--token-file", str(tmp_path / file)])
        assert isinstance(result.exception, LaunchError)
        assert said in result.exception.message


def test_what_further_workers_cannot_take_part_in_is_named():
    def obstacle(sync):
        return why_nobody_joins(make_plan("run", ["here"] * 2, PlanRequest(sync=sync), cores=2))

    assert obstacle("gossip") == "--sync gossip"
    assert obstacle("local(periods=[2, 4])") == "--sync local(periods=[2, 4])"
    assert not obstacle("local(4)")
    assert not obstacle("full")


def test_a_script_that_has_changed_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("pass\n")
    digest = ScriptDigest([str(script), "--epochs", "3"])
    os.utime(script, (1, 1))
    assert digest.changed == ""
    script.write_text("1\n")
    assert digest.changed == "train.py"
    assert ScriptDigest(["-m", "no.such.module"]).changed == ""
