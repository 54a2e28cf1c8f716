"""Every registered launcher against the contract that they all have in common, on its real engine.

A new launcher is covered by being in `start/launchers/`, with a file in `tests/engines/` that says how a
test gets its engine. All runs are commands, as a user starts them.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from echelon.observe.events import RunEnded, StepEnded, WorkerJoined, read_events
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.launcher import LAUNCHERS
from engines import PATH, Engine, decoded, engine_of, wait_until_gone

ROOT = Path(__file__).parents[2]
SECRET = "the-secret-of-these-tests"
# Until all processes of a run are gone; engines look at their tasks every second or so.
RUN_S = 200.0

# Values are small multiples of powers of two: every sum is exact, in whatever order it is taken.
TRAIN = """
import os, signal, sys, torch, echelon
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

session = echelon.join()
torch.manual_seed(0)
x = torch.randint(-1, 2, (16, 3)).float()
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True) + 1), batch_size=8, shuffle=True)
model = nn.Linear(3, 1)
for parameter in model.parameters():
    nn.init.zeros_(parameter)
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(int(sys.argv[1])):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    if session.rank == 1 and "fail" in sys.argv:
        raise ValueError("a fault of its own")
    if session.rank == 1 and "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
print("weights", [value.item().hex() for p in model.parameters() for value in p.flatten()])
print("secret", os.environ.get("ECHELON_SECRET"))
print("threads", torch.get_num_threads())
"""

PROGRAM = """
import json, sys, threading
import echelon

def place(first, *, second):
    session = echelon.join()
    return first, second, session.rank, session.world_size

def fail():
    if echelon.join().rank == 1:
        raise KeyError("a fault of its own")

settings = json.loads(sys.argv[1])
told = {"results": echelon.launch(place, ("one",), {"second": 2}, quiet=True, **settings)}
lock = threading.Lock()
try:
    echelon.launch(lambda: lock, quiet=True, **settings)
except echelon.LaunchError as error:
    told["not pickled"] = error.message
try:
    echelon.launch(fail, quiet=True, **settings)
except echelon.FunctionFailed as error:
    told["failed"] = [error.message, list(error.ranks), repr(error.__cause__)]
print(json.dumps(told))
"""


@pytest.fixture(scope="module", params=LAUNCHERS.names())
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    kind = engine_of(request.param)
    missing = kind.missing()
    if missing:
        pytest.skip(f"engine {kind.name}: {missing}")
    made = kind(tmp_path_factory.mktemp(f"engine-{kind.name}"))
    yield made
    made.close()


@pytest.fixture
def work(tmp_path: Path, engine: Engine) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(TRAIN)
    yield tmp_path
    wait_until_gone(engine)


def _environment(engine: Engine) -> dict[str, str]:
    return {**os.environ, **PATH, "ECHELON_SECRET": SECRET, **engine.env}


def _command(engine: Engine, *words: str) -> list[str]:
    return [sys.executable, "-m", "echelon", "run", *engine.words(2), *words]


def _run(engine: Engine, work: Path, argv: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=work, env=_environment(engine), capture_output=True, text=True, timeout=RUN_S
    )


def _folder(work: Path) -> RunFolder:
    (path,) = (work / "runs").iterdir()
    return RunFolder(path)


@dataclass
class Finished:
    """A whole run, and the command lines of all processes of the machine while it went on."""

    work: Path
    code: int
    out: str
    errors: str
    command_lines: set[tuple[str, ...]] = field(default_factory=set)


@pytest.fixture(scope="module")
def finished(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    work = tmp_path_factory.mktemp(f"finished-{engine.name}")
    (work / "train.py").write_text(TRAIN)
    seen: set[tuple[str, ...]] = set()
    with (work / "out").open("w") as out, (work / "errors").open("w") as errors:
        started = subprocess.Popen(
            _command(engine, "--threads", "2", "train.py", "2"),
            cwd=work,
            env=_environment(engine),
            stdout=out,
            stderr=errors,
        )
        until = time.monotonic() + RUN_S
        while started.poll() is None:
            assert time.monotonic() < until, (work / "errors").read_text()
            seen |= {tuple(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])}
            time.sleep(0.05)
    wait_until_gone(engine)
    return Finished(
        work, started.returncode, (work / "out").read_text(), (work / "errors").read_text(), seen
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the script prints when it runs by itself."""
    work = tmp_path_factory.mktemp("alone")
    (work / "train.py").write_text(TRAIN)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "train.py", "2"], cwd=work, env=env, capture_output=True, text=True, timeout=RUN_S
    )
    assert done.returncode == 0, done.stderr
    return _line(done.stdout, "weights")


def _line(text: str, first: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(first))
    return line


def test_workers_have_the_weights_of_one_process_to_the_last_bit(finished: Finished, alone: str) -> None:
    assert finished.code == 0, finished.errors
    assert _line(finished.out, "weights") == alone


def test_the_record_of_all_ranks_is_in_the_launchers_folder(finished: Finished) -> None:
    folder = _folder(finished.work)
    plan = Plan.read(folder.plan)
    for worker in plan.workers:
        events = list(read_events(folder.events_of(worker.rank)))
        (joined,) = (event for event in events if isinstance(event, WorkerJoined))
        assert joined.node == worker.node
        assert [event.step for event in events if isinstance(event, StepEnded)] == [0, 1, 2, 3]
        assert "weights" in folder.log_of(worker.rank).read_text()
    assert len(plan.workers) == 2
    assert json.loads(folder.summary.read_text())["steps"] == 4
    assert not list(folder.errors.iterdir())


def test_workers_use_as_many_threads_as_the_plan_says(finished: Finished) -> None:
    folder = _folder(finished.work)
    for worker in Plan.read(folder.plan).workers:
        assert worker.threads == 2
        log = folder.log_of(worker.rank).read_text()
        assert _line(log, "threads") == f"threads {worker.threads}"


def test_workers_know_the_secret_and_no_command_line_or_record_has_it(finished: Finished) -> None:
    assert _line(finished.out, "secret") == f"secret {SECRET}"
    words = {word for line in finished.command_lines for word in line}
    assert "train.py" in words
    assert not [word for word in words if SECRET in word or SECRET.encode() in decoded(word)]
    folder = _folder(finished.work)
    kept = [
        file for file in folder.path.rglob("*") if file.is_file() and file.parent != folder.path / "logs"
    ]
    assert folder.config in kept
    assert not [file for file in kept if SECRET.encode() in file.read_bytes()]
    assert SECRET not in finished.errors


def test_a_secret_that_is_encoded_in_a_command_line_would_be_noticed() -> None:
    text = base64.b64encode(f"to be kept: {SECRET}".encode()).decode()
    assert SECRET.encode() in decoded(f"--export=ECHELON_INVITATION={text}")
    assert SECRET.encode() not in decoded("--export=ALL")


def test_error_of_one_rank_is_shown_with_rank_node_and_traceback(engine: Engine, work: Path) -> None:
    done = _run(engine, work, _command(engine, "train.py", "2", "fail"))
    assert done.returncode == 1, done.stderr
    node = Plan.read(_folder(work).plan).workers[1].node
    assert f"rank 1 on {node} failed: ValueError: a fault of its own" in done.stderr
    assert 'raise ValueError("a fault of its own")' in done.stderr


def test_killed_worker_is_named(engine: Engine, work: Path) -> None:
    done = _run(engine, work, _command(engine, "train.py", "2", "kill"))
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    node = Plan.read(_folder(work).plan).workers[1].node
    assert f"rank 1 on {node} failed: killed by SIGKILL" in done.stderr


def test_the_other_worker_goes_on_without_a_killed_one_if_that_is_asked_for(
    engine: Engine, work: Path
) -> None:
    done = _run(
        engine, work, _command(engine, "--min-workers", "1", "--respawn", "0", "train.py", "3", "kill")
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 was lost (SIGKILL); 1 workers go on" in done.stderr
    assert "weights" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_when_the_launcher_ends(engine: Engine, work: Path, number: int) -> None:
    with (work / "out").open("wb") as out:
        started = subprocess.Popen(
            _command(engine, "train.py", "1000000"),
            cwd=work,
            env=_environment(engine),
            stdout=out,
            stderr=out,
        )
        until = time.monotonic() + RUN_S
        while not any(_stepped(path) for path in work.glob("runs/*/events/rank-1.jsonl")):
            assert time.monotonic() < until, (work / "out").read_text()
            assert started.poll() is None, (work / "out").read_text()
            time.sleep(0.05)
        assert len(engine.processes()) >= 3
        started.send_signal(number)
        code = started.wait(timeout=90)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    wait_until_gone(engine)
    if number != signal.SIGKILL:
        (last,) = (e for e in read_events(_folder(work).events_of(-1)) if isinstance(e, RunEnded))
        assert last.outcome == "interrupted"


def _stepped(path: Path) -> bool:
    return any(isinstance(event, StepEnded) for event in read_events(path))


def test_function_returns_its_results_by_rank_and_its_errors(engine: Engine, work: Path) -> None:
    (work / "program.py").write_text(PROGRAM)
    done = _run(engine, work, [sys.executable, "program.py", json.dumps(engine.settings(2))])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["results"] == [["one", 2, 0, 2], ["one", 2, 1, 2]]
    assert "cannot be pickled" in told["not pickled"]
    message, ranks, cause = told["failed"]
    assert "failed: KeyError: 'a fault of its own'" in message
    assert (ranks, cause) == ([1], "KeyError('a fault of its own')")


def test_workers_with_a_server_train_without_waiting_for_each_other(engine: Engine, work: Path) -> None:
    done = _run(engine, work, _command(engine, "--servers", "1", "--sync", "async", "train.py", "2"))
    assert done.returncode == 0, done.stderr
    folder = _folder(work)
    assert Plan.read(folder.plan).sync == "async"
    assert folder.log_of(2).exists()
    assert json.loads(folder.summary.read_text())["outcome"] == "completed"
