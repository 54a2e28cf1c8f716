"""Workers on other machines, by a real ssh: the same figures, clear errors, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.observe.events import Decided, StepEnded, WorkerJoined, read_events
from sshd import MISSING, SshServer

SOURCE = Path(__file__).parents[2] / "src"
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

TRAIN = """
import sys, torch, echelon
from helper import LR
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = echelon.join()
torch.manual_seed(0)
data = torch.randn(90, 4)
loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=30, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(int(sys.argv[1])):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if "fail" in sys.argv and session.rank == 2:
        raise ValueError("a fault of its own")
print("weights", [round(v, 4) for v in model.weight.flatten().tolist()])
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = SshServer(tmp_path_factory.mktemp("ssh"), SOURCE)
    yield made
    made.close()


@pytest.fixture
def work(tmp_path, server):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "helper.py").write_text("LR = 0.1\n")
    yield tmp_path
    until = time.monotonic() + 90
    while left := server.processes():
        assert time.monotonic() < until, left
        time.sleep(0.1)


def command(server, *words, hosts="a:2,b:1"):
    return [sys.executable, "-m", "echelon", "run", "--on", server.launcher, "--hosts", hosts, *words]


def run(work, argv):
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "400"}
    return subprocess.run(argv, cwd=work, env=env, capture_output=True, text=True, timeout=240)


def test_workers_that_ssh_starts_train_as_one_process_and_the_record_is_complete_here(server, work):
    alone = subprocess.run(
        [sys.executable, "train.py", "3"],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    done = run(work, command(server, "--copy", "train.py", "3"))
    assert done.returncode == 0, done.stderr
    assert alone.stdout.splitlines()[-1] in done.stdout
    (folder,) = (work / "runs").iterdir()
    for rank, node in enumerate("aab"):
        events = list(read_events(folder / "events" / f"rank-{rank}.jsonl"))
        assert [event.node for event in events if isinstance(event, WorkerJoined)] == [node]
        assert len([event for event in events if isinstance(event, StepEnded)]) == 9
        assert "weights" in (folder / "logs" / f"rank-{rank}.log").read_text()
    assert (folder / "summary.json").exists()
    assert "9 steps in" in done.stderr


def test_error_of_a_worker_elsewhere_is_shown_here_with_rank_and_machine(server, work):
    done = run(work, command(server, "train.py", "3", "fail"))
    assert done.returncode == 1
    assert "ValueError: a fault of its own" in done.stderr
    assert "rank 2 on b failed: ValueError: a fault of its own" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_anywhere_when_the_launcher_ends(server, work, number):
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(
            command(server, "train.py", "1000000"), cwd=work, env=env, stdout=out, stderr=out
        )
        until = time.monotonic() + 120
        while not any(_stepped(path) for path in work.glob("runs/*/events/rank-2.jsonl")):
            assert time.monotonic() < until, (work / "out").read_text()
            time.sleep(0.1)
        assert server.processes()
        started.send_signal(number)
        assert started.wait(timeout=90) == (130 if number == signal.SIGINT else -number)


def test_a_server_on_one_of_the_machines_serves_the_workers_of_all(server, work):
    words = ["--servers", "1", "--sync", "backup(1)", "--copy", "train.py", "2"]
    done = run(work, command(server, *words, hosts="a:2,b:2"))
    assert done.returncode == 0, done.stderr
    assert "backup(1): the server made " in done.stderr
    (folder,) = (work / "runs").iterdir()
    assert [str(path) for path in folder.glob("errors/*")] == []
    decided = list(read_events(folder / "events" / "rank-4.jsonl"))
    updates = [event for event in decided if isinstance(event, Decided)]
    contributors = {part[0] for event in updates for part in event.parts}
    assert contributors <= {0, 1, 2, 3}
    assert contributors & {2, 3}  # of the machine without the server


def doctor(server, work, hosts, *words, on=""):
    argv = [sys.executable, "-m", "echelon", "doctor", "--on", on or server.launcher, "--hosts", hosts]
    return run(work, [*argv, *words])


def test_doctor_says_that_a_run_will_work(server, work):
    done = doctor(server, work, "a:1,b:1")
    assert done.returncode == 0, done.stdout
    assert done.stderr.startswith("checking 2 machines, for at most ")
    assert "a and b are one machine" in done.stdout
    for step in ("ssh", "versions", "Python", "processor", "memory", "/dev/shm", "clock"):
        assert f"{step:9}" in done.stdout, done.stdout


def test_doctor_names_what_is_wrong_with_one_machine_and_checks_the_others(server, work):
    done = doctor(server, work, "a,nowhere.invalid,b", "--json")
    assert done.returncode == 1, done.stdout
    answer = json.loads(done.stdout)
    problems = [one for one in answer["findings"] if one["level"] == "problem"]
    assert [(one["topic"], one["subject"]) for one in problems] == [("nowhere.invalid", "ssh")]
    assert "nowhere.invalid" in problems[0]["text"]
    assert problems[0]["fix"]
    assert set(answer["machines"]) == {"a", "b"}
    assert {(one["source"], one["target"]) for one in answer["attempts"]} == {("a", "b"), ("b", "a")}
    assert all(not one["outcome"]["problem"] for one in answer["attempts"])


@pytest.mark.parametrize(
    ("python", "step"),
    [("{work}/no-python", "Python"), ("{work}/bare", "Echelon"), ("{work}/chatty", "shell")],
)
def test_doctor_names_the_step_that_fails(server, work, python, step):
    (work / "bare").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    (work / "chatty").write_text("#!/bin/sh\necho Welcome to this machine; exec cat\n")
    for name in ("bare", "chatty"):
        (work / name).chmod(0o755)
    python = python.format(work=work)
    done = doctor(server, work, "a", on=f'ssh(python="{python}", command="ssh -F {server.config}")')
    assert done.returncode == 1
    assert f"a, {step}: " in done.stdout, done.stdout + done.stderr


def test_a_port_that_the_first_machine_cannot_open_ends_the_run_at_once_and_doctor_says_so(server, work):
    with socket.create_server(("", 0)) as used:
        port = str(used.getsockname()[1])
        done = run(work, command(server, "--port", port, "train.py", "1"))
        found = doctor(server, work, "a,b", "--port", port)
    assert f"port {port} of a cannot be opened: Address already in use" in done.stderr
    assert done.returncode == 2
    assert not (work / "runs").exists()
    assert found.returncode == 1
    assert f"port {port} of a cannot be opened" in found.stdout


def test_a_fixed_port_is_where_the_workers_meet(server, work):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (work / "port.py").write_text(
        "import os, echelon; echelon.join(); print('at', os.environ['ECHELON_PORT'])"
    )
    done = run(work, command(server, "--port", port, "--copy", "port.py"))
    assert done.returncode == 0, done.stderr
    assert f"at {port}" in done.stdout


def _stepped(path):
    return any(isinstance(event, StepEnded) for event in read_events(path))


@pytest.mark.parametrize(
    ("words", "hosts", "told"),
    [
        (["train.py", "1"], "a,nowhere.invalid", "the agent on nowhere.invalid is gone: "),
        (["--workers", "9", "train.py", "1"], "a:2,b:1", "9 workers do not fit the 3 slots"),
        (["--lab", "two-sites", "train.py", "1"], "a", "--lab emulates machines"),
        (["--on", "shh", "train.py", "1"], "a", "unknown launcher 'shh'"),
    ],
)
def test_runs_that_cannot_work_end_at_once_with_the_reason(server, work, words, hosts, told):
    done = run(work, command(server, *words, hosts=hosts))
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert not (work / "runs").exists()
