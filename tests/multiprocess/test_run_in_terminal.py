"""Real `echelon run` with a terminal, a pipe or a file: what scripts read, and what users see."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echelon.observe.events import Noted, WorkerJoined, read_events
from echelon.observe.run_folder import RunFolder
from terminal import Terminal

HOST = socket.gethostname()
ECHELON = (sys.executable, "-m", "echelon")
ENVIRONMENT = {**os.environ, "NO_COLOR": "1"}

# As a well-known script does on every worker, when it is imported.
ASKS = """
import os, sys
_, width = os.popen("stty size", "r").read().split()
print(os.environ["RANK"], "is", width, "wide", flush=True)
if os.environ["RANK"] == "0":
    print("hello", input("name? "), flush=True)
else:
    print("read", repr(sys.stdin.read()), flush=True)
"""

# Trains until Ctrl-C, and prints a progress bar of its own.
TRAINS = """
import time
import echelon, torch
from torch.utils.data import DataLoader, TensorDataset
session = echelon.join()
data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8)
model, optimizer, loader = session.prepare(model, optimizer, loader)
session.expect_steps(100000)
for epoch in session.epochs(EPOCHS):
    for index, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
        print(f"\\r{index + 1} of {len(loader)}", end="", flush=True)
        time.sleep(PAUSE)
    print(f"\\nepoch {epoch} has ended")
"""


@pytest.fixture
def terminal(tmp_path) -> Iterator[Callable[..., Terminal]]:
    """Starts a script on two workers, in a terminal."""
    started = []

    def start(script: str, *options: str) -> Terminal:
        (tmp_path / "script.py").write_text(script)
        argv = [*ECHELON, "run", "--workers", "2", *options, "script.py"]
        started.append(Terminal(argv, cwd=tmp_path, env=ENVIRONMENT))
        return started[-1]

    yield start
    for one in started:
        one.close()


def _piped(folder: Path, script: str, *options: str, given: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [*ECHELON, "run", "--workers", "2", *options, "script.py"],
        cwd=folder,
        env={**ENVIRONMENT, "COLUMNS": "100"},
        input=given.encode(),
        capture_output=True,
        timeout=240,
    )
    # Not as text: Python would turn carriage returns into newlines.
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def _training(*, epochs: int, pause_s: float) -> str:
    return TRAINS.replace("EPOCHS", str(epochs)).replace("PAUSE", str(pause_s))


def _run(folder: Path) -> RunFolder:
    (path,) = (folder / "runs").iterdir()
    return RunFolder(path)


def _left(folder: Path) -> list[int]:
    """Processes of this folder's runs that still exist."""
    mark = f"ECHELON_RUN={folder}/".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


# Input


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_script_knows_the_terminal_and_its_leader_reads_what_is_typed(tmp_path, terminal, start):
    shown = terminal(ASKS, "--start", start)
    shown.until("name?")
    shown.press("bob\n")
    assert shown.end() == 0, shown.shown
    assert "0 is 100 wide\nname? bob\nhello bob\n" in shown.shown
    assert _run(tmp_path).log_of(1).read_text() == "1 is 100 wide\nread ''\n"


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_pipe_is_read_by_the_leader(tmp_path, start):
    asks = "if os.environ['RANK'] == '0': print(input('sure? '))"
    script = f"import os, sys\n{asks}\nprint(repr(sys.stdin.read()))"
    done = _piped(tmp_path, script, "--start", start, given="yes\nand more")
    assert (done.returncode, done.stdout) == (0, "sure? yes\n'and more'\n"), done.stderr
    assert _run(tmp_path).log_of(1).read_text() == "''\n"


def test_worker_that_has_nothing_to_read_is_told_why(tmp_path):
    done = _piped(tmp_path, "input()", given="yes\nno\n")
    assert done.returncode == 1
    *_, failed, why, _ = done.stderr.splitlines()
    assert failed == f"rank 1 on {HOST} failed: EOFError: EOF when reading a line"
    assert why == "  why: only rank 0 has the launcher's input; ask there, with session.is_leader"


def test_ctrl_c_while_the_leader_reads_ends_the_run(tmp_path, terminal):
    shown = terminal(ASKS)
    shown.until("name?")
    shown.press("\x03")
    assert shown.end() == 130
    assert shown.shown.splitlines()[-1].startswith("interrupted; record: runs/")
    assert "Traceback" not in shown.shown
    assert _left(tmp_path) == []


# The display


def test_panel_is_below_the_scripts_output_and_a_table_takes_its_place(terminal):
    shown = terminal(_training(epochs=40, pause_s=0.01))
    shown.until(f"   1  {HOST}")  # the panel's last row
    shown.until("%", after=f"   1  {HOST}")
    above, below = shown.shown.split("─" * 100)
    assert "joined after" in above
    assert "rank 0's output follows, from its share of each batch" in above
    assert "samples/s  loss" in below
    assert [line.split()[:3] for line in below.splitlines()[-2:]] == [["0", HOST, "4"], ["1", HOST, "4"]]
    assert shown.end() == 0, shown.shown
    lines = shown.shown.splitlines()
    ended = [f"epoch {epoch} has ended" for epoch in range(40)]
    assert [line for line in lines if line.startswith("epoch ")] == ended, "none is lost or repeated"
    assert lines.count("8 of 8") == 40
    assert "of 100000" not in shown.shown, "the panel is gone"
    assert "320 steps in " in shown.shown
    assert lines[-1].startswith("picture: echelon report runs/")


def test_worker_that_is_stopped_is_noticed_and_the_time_left_is_no_longer_promised(tmp_path, terminal):
    shown = terminal(_training(epochs=100000, pause_s=0.01))
    shown.until(" left")
    (joined,) = (e for e in read_events(_run(tmp_path).events_of(1)) if isinstance(e, WorkerJoined))
    os.kill(joined.pid, signal.SIGSTOP)
    shown.until("no step for ")
    assert " left" not in shown.shown
    assert "samples/s  loss" not in shown.shown
    os.kill(joined.pid, signal.SIGCONT)
    shown.until("no step for ", gone=True)
    shown.until(" left")
    shown.press("\x03")
    assert shown.end() == 130
    assert " steps in " in shown.shown
    assert shown.shown.splitlines()[-1].startswith("interrupted; record: runs/")
    assert _left(tmp_path) == []


def test_without_a_terminal_the_output_is_the_scripts_own_and_the_table_is_on_stderr(tmp_path):
    done = _piped(tmp_path, _training(epochs=2, pause_s=0))
    assert done.returncode == 0, done.stderr
    passed = "".join(f"\r{index + 1} of 8" for index in range(8))
    assert done.stdout == f"{passed}\nepoch 0 has ended\n{passed}\nepoch 1 has ended\n"
    assert "\x1b" not in done.stderr
    assert "16 steps in " in done.stderr
    assert "samples/s" in done.stderr.split("joined after")[1]


# Notes, warnings and errors

WARNS = """
import atexit, logging, os
import echelon
session = echelon.join()
log = logging.getLogger("echelon.train.odd")
log.warning("all of them")
if session.rank == 1:
    log.warning("only one")
    session.note("falls back")
session.warn("by the session")
session.barrier()
session.close()
atexit.register(lambda: log.warning("at the end of %d", session.rank))
"""


def test_notes_and_warnings_of_all_workers_are_shown_once(tmp_path):
    done = _piped(tmp_path, WARNS)
    assert done.returncode == 0, done.stderr
    warned = "WARNING echelon.train.odd: "
    by_session = "WARNING echelon.train.script_log: by the session"
    assert done.stdout == f"{warned}all of them\n{by_session}\n{warned}at the end of 0\n"
    noted = [e.text for e in read_events(_run(tmp_path).events_of(0)) if isinstance(e, Noted)]
    assert noted == ["all of them", "by the session", "at the end of 0"]
    told = done.stderr.splitlines()
    assert sorted(told[2:-3]) == [
        "note: falls back",
        "warning of rank 1: at the end of 1",
        "warning of rank 1: only one",
    ]
    assert told[-3] == "no step was recorded"


FAILS = """
import echelon, torch
session = echelon.join()
model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(4, 1))
model = session.prepare(model)
print("before")
model(torch.ones(3, 5))
"""


def test_mistake_that_all_workers_make_is_shown_once_and_is_not_echelons(tmp_path):
    done = _piped(tmp_path, FAILS)
    assert done.returncode == 1
    assert done.stdout == "before\n"
    assert done.stderr.count("Traceback") == 1
    assert "src/echelon/" not in done.stderr
    *_, error, failed, also, log = done.stderr.splitlines()
    cause = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x5 and 4x1)"
    assert (error, failed) == (cause, f"rank 0 on {HOST} failed: {cause}")
    assert also == "  also: rank 1, with the same error"
    assert log == f"  log: runs/{_run(tmp_path).name}/logs/rank-0.log"


def test_logging_that_a_script_sets_up_works(tmp_path):
    script = "import logging\nlogging.basicConfig(level=logging.INFO)\nlogging.info('of the script')"
    done = _piped(tmp_path, script)
    assert done.stdout == "INFO:root:of the script\n"
