"""What a machine's answers mean: which step fails, and how to fix it."""

from __future__ import annotations

import platform
from dataclasses import replace
from importlib import metadata

import pytest

from echelon.cluster.machine import describe_machine
from echelon.start import diagnosis
from echelon.start.agents.protocol import Introduction, MachineDescription

HERE = Introduction(
    host="b",
    pid=1,
    cores=2,
    echelon=metadata.version("echelon"),
    python=platform.python_version(),
    torch=metadata.version("torch"),
    addresses=[],
)
MACHINE = replace(
    describe_machine(),
    cores_usable=2,
    memory_available_bytes=8 * 10**9,
    memory_limit_bytes=None,
    shm_bytes=2**30,
    shm_free_bytes=2**30,
)


@pytest.mark.parametrize(
    ("said", "step", "fix"),
    [
        ("ssh: Could not resolve hostname b: Name or service not known", "ssh", "correct the name"),
        ("me@b: Permission denied (publickey).", "ssh", "ssh-copy-id b"),
        ("Host key verification failed.", "ssh", "accept the key"),
        ("ssh: connect to host b port 22: Connection refused", "ssh", "start the ssh server"),
        ("kex_exchange_identification: closed", "ssh", "try it by hand: ssh b true"),
        ("bash: line 1: /opt/python: No such file or directory", "Python", "python=/path/to/python"),
        ("zsh:1: no such file or directory: /opt/python", "Python", "python=/path/to/python"),
        (
            "/opt/python: Error while finding module: No module named 'echelon'",
            "Echelon",
            "install Echelon",
        ),
        ("b sent what is not a message", "shell", "interactive"),
    ],
)
def test_the_step_that_failed_is_named_with_its_fix(said, step, fix):
    found = diagnosis.unreached("b", "ssh", "/opt/python", said)
    assert (found.level, found.topic, found.subject) == ("problem", "b", step)
    assert fix in found.fix


def test_every_version_that_differs_is_a_problem_and_the_others_are_told():
    other = Introduction(
        host="b", pid=1, cores=2, echelon="9.9", python="3.4.1", torch=HERE.torch, addresses=[]
    )
    found = {one.subject: one for one in diagnosis.introduced("b", "ssh", other)}
    assert found["Echelon"].level == found["Python"].level == "problem"
    assert found["Echelon"].text == f"9.9, this machine has {HERE.echelon}"
    assert found["versions"].text == f"torch {HERE.torch}, as here"
    assert [one.level for one in diagnosis.introduced("b", "ssh", HERE)] == ["ok", "ok"]


def described(slots=2, off_s=0.0, **facts):
    said = MachineDescription(t=0.0, executable="python", machine=replace(MACHINE, **facts), interfaces=[])
    return {one.subject: one for one in diagnosis.described("b", slots, said, off_s, 0.01)}


def test_a_machine_that_has_what_its_workers_need_is_ok():
    assert {one.level for one in described().values()} <= {"ok", "note"}
    assert described()["clock"].level == "ok"
    assert "workers" not in described()


def test_a_clock_that_differs_is_a_note_that_says_by_how_much():
    assert described(off_s=12.0)["clock"].text.startswith("12.0 s ahead of this machine's")
    assert described(off_s=-12.0)["clock"].text.startswith("12.0 s behind this machine's")
    assert described(off_s=12.0)["clock"].level == "note"


def test_too_many_workers_for_cores_are_a_note_and_for_memory_a_problem():
    assert described(slots=3)["workers"].level == "note"
    assert described(slots=40)["workers"].level == "problem"
    assert described(slots=40)["workers"].fix == "give it fewer: b:32"
