"""What only Dask does: its workers die, are busy, or too few; the program's own client is used."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from echelon.observe.events import StepEnded, read_events
from engines import PATH, wait_until_gone
from engines.dask import MISSING, DaskEngine

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
RUN_S = 200.0

TRAIN = """
import sys, torch, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = echelon.join()
torch.manual_seed(0)
x = torch.randn(16, 3)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(int(sys.argv[1])):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""

# Without an address: first the client that the program has, then a cluster of the run's own.
PROGRAM = """
import sys
import distributed, echelon

def place():
    session = echelon.join()
    return session.rank, session.world_size

with distributed.Client(sys.argv[1]) as client:
    print("with", echelon.launch(place, workers=3, on="dask", quiet=True))
    assert client.submit(lambda: 42).result() == 42
print("without", echelon.launch(place, workers=2, on="dask", quiet=True))
"""

# Keeps all of Dask's workers busy.
BUSY = """
import sys, threading, time
import distributed
with distributed.Client(sys.argv[1]) as client:
    slow = client.map(lambda number: time.sleep(3600), range(3), pure=False)
    while sum(len(tasks) for tasks in client.processing().values()) < 3:
        time.sleep(0.05)
    print("busy", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaskEngine]:
    made = DaskEngine(tmp_path_factory.mktemp("engine-dask"))
    yield made
    made.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[DaskEngine]:
    """For a test whose cluster is not the same afterwards: Dask starts its workers again."""
    made = DaskEngine(tmp_path)
    yield made
    wait_until_gone(made)
    made.close()


@pytest.fixture
def work(tmp_path: Path, engine: DaskEngine) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    yield tmp_path
    wait_until_gone(engine)


def _environment(engine: DaskEngine) -> dict[str, str]:
    return {**os.environ, **PATH, **engine.env}


def _run(engine: DaskEngine, work: Path, argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=work, env=_environment(engine), capture_output=True, text=True, timeout=RUN_S
    )


def _command(on: str, workers: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "echelon", "run", "--on", on, "--workers", str(workers), *words]


@pytest.mark.parametrize(
    ("on", "told"),
    [
        ("", "4 workers are asked for, and the Dask cluster at tcp://"),
        ("dask(address='tcp://127.0.0.1:1')", "no Dask scheduler answers at tcp://127.0.0.1:1"),
    ],
)
def test_runs_that_cannot_work_end_with_the_reason(
    engine: DaskEngine, work: Path, on: str, told: str
) -> None:
    done = _run(engine, work, _command(on or engine.on, 4, "--join-timeout-s", "3", "train.py", "1"))
    assert done.returncode == 2, done.stderr
    assert told in done.stderr.replace("\n", " ")
    assert not (work / "runs").exists()


def test_client_of_the_program_is_used_and_left_and_without_one_a_cluster_is_made(
    engine: DaskEngine, work: Path
) -> None:
    done = _run(engine, work, [sys.executable, "-c", PROGRAM, engine.address])
    assert done.returncode == 0, done.stderr
    assert "with [(0, 3), (1, 3), (2, 3)]" in done.stdout
    assert "without [(0, 2), (1, 2)]" in done.stdout


def test_death_of_a_worker_of_dask_ends_the_run_and_is_named(own: DaskEngine, tmp_path: Path) -> None:
    engine, work = own, tmp_path
    (work / "train.py").write_text(TRAIN)
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(
            _command(engine.on, 2, "train.py", "1000000"),
            cwd=work,
            env=_environment(engine),
            stdout=out,
            stderr=out,
        )
    until = time.monotonic() + RUN_S
    while not any(_stepped(path) for path in work.glob("runs/*/events/rank-1.jsonl")):
        assert started.poll() is None, (work / "out").read_text()
        assert time.monotonic() < until, (work / "out").read_text()
        time.sleep(0.05)
    _worker_of(engine).send_signal(signal.SIGKILL)
    assert started.wait(timeout=RUN_S) == 1
    told = (work / "out").read_text()
    assert re.search(
        r"rank \d on \S+ failed: .*the agent on \S+ is gone: Dask's worker tcp://\S+ is gone", told
    ), told


def _stepped(path: Path) -> bool:
    return any(isinstance(event, StepEnded) for event in read_events(path))


def _worker_of(engine: DaskEngine) -> psutil.Process:
    """Dask's process that the run's agent is a child of."""
    agents = [one for one in engine.processes() if "echelon.start.agents.agent" in one.cmdline()]
    (parent,) = {one.parent() for one in agents}
    assert parent is not None
    return parent


def test_run_that_waits_for_busy_workers_says_so(own: DaskEngine, tmp_path: Path) -> None:
    engine, work = own, tmp_path
    (work / "train.py").write_text(TRAIN)
    other = subprocess.Popen(
        [sys.executable, "-c", BUSY, engine.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=_environment(engine),
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline().strip() == "busy"
    done = _run(engine, work, _command(engine.on, 2, "--join-timeout-s", "3", "train.py", "1"))
    other.communicate(timeout=RUN_S)
    assert done.returncode == 2, done.stderr
    assert re.search(r"tcp://\S+ has 1 other tasks", done.stderr.replace("\n", " ")), done.stderr
