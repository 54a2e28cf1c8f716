"""Workers on other machines, by a real ssh: the same figures, clear errors, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.observe.events import StepEnded, WorkerJoined, read_events
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
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
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
