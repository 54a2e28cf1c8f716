"""WorkerProcesses with plain Python children. They do not import torch, so they start in milliseconds."""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from echelon.errors import LaunchError
from echelon.observe.run_folder import RunFolder
from echelon.start.command import WorkerCommand
from echelon.start.failure import Failure
from echelon.start.processes import WorkerProcesses

SLEEP = "import time; time.sleep(250)"
SAY_AND_SLEEP = "print('here', flush=True); " + SLEEP
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SAY_AND_SLEEP
PARENT = (
    f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); "
    "print(child.pid, flush=True); "
)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path).with_subfolders()


def _commands(*programs: str, **env: str) -> list[WorkerCommand]:
    return [
        WorkerCommand(
            rank=rank, node=f"n{rank // 2}", argv=[sys.executable, "-c", program], env={**os.environ, **env}
        )
        for rank, program in enumerate(programs)
    ]


def _until(condition, what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited 120 s for: {what}"
        time.sleep(0.01)


def _said(folder: RunFolder, rank: int) -> str:
    _until(lambda: folder.log_of(rank).read_text().endswith("\n"), f"a line of rank {rank}")
    return folder.log_of(rank).read_text().strip()


def _is_gone(pid: int) -> bool:
    """Ended, even if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_workers_run_their_own_commands_and_print_into_their_own_logs(folder):
    said = "import os, sys; print('out', os.environ['COLOUR']); print('err', file=sys.stderr)"
    with WorkerProcesses(folder, _commands(said, "print('second')", COLOUR="blue")) as processes:
        _until(processes.all_done, "both to end")
        assert processes.exit_codes() == {0: 0, 1: 0}
        assert processes.failure() is None
    assert sorted(folder.log_of(0).read_text().splitlines()) == ["err", "out blue"]
    assert folder.log_of(1).read_text() == "second\n"


def test_processes_are_found_by_node(folder):
    with WorkerProcesses(folder, _commands(SLEEP, SLEEP, SLEEP)) as processes:
        assert processes.size == 3
        assert [processes.node_of(rank) for rank in range(3)] == ["n0", "n0", "n1"]
        assert len(set(processes.pids_on("n0"))) == 2
        assert len(processes.pids_on("n1")) == 1
        assert processes.pids_on("nowhere") == []
        assert not processes.all_done()
        assert processes.failure() is None


def test_failed_worker_is_reported_with_its_exit_code(folder):
    with WorkerProcesses(folder, _commands(SLEEP, "raise SystemExit(3)")) as processes:
        _until(processes.exit_codes, "the second to end")
        failure = processes.failure()
    assert (failure.rank, failure.cause) == (1, "ended with exit code 3 and no exception")


def test_a_worker_that_ends_after_the_losses_were_looked_at_is_no_failure_yet(folder):
    with WorkerProcesses(folder, _commands("raise SystemExit(4)", "raise SystemExit(3)")) as processes:
        _until(processes.all_done, "both to end")
        processes.excused, processes.judged = frozenset([0]), {0}
        assert processes.failure() is None
        processes.judged = {0, 1}
        failure = processes.failure()
        assert failure is not None
        assert failure.rank == 1


def test_killed_worker_is_reported_with_the_signal(folder):
    with WorkerProcesses(folder, _commands(SLEEP, SAY_AND_SLEEP)) as processes:
        _said(folder, 1)
        os.kill(processes.pids_on("n0")[1], signal.SIGKILL)
        _until(processes.exit_codes, "the second to be dead")
        failure = processes.failure()
    assert (failure.rank, failure.message[:17]) == (1, "killed by SIGKILL")


def _fails(rank: int, folder: RunFolder, *, consequence: bool, after: int | None = None) -> str:
    """A program that leaves its reason in the run's folder and ends with code 1, as a worker does.

    With `after`, it does so a moment after another worker has.
    """
    failure = Failure(
        rank=rank, t=float(rank), kind="ValueError", message=f"reason {rank}", consequence=consequence
    )
    data = msgspec.json.encode(failure)
    wait = (
        f"while not Path({str(folder.error_of(after))!r}).exists(): time.sleep(0.01)"
        if after is not None
        else ""
    )
    return (
        "import sys, time\nfrom pathlib import Path\nprint('here', flush=True)\n"
        f"{wait}\ntime.sleep({0.1 if wait else 0})\n"
        f"Path({str(folder.error_of(rank))!r}).write_bytes({data!r})\nsys.exit(1)"
    )


def test_workers_own_reason_is_preferred_to_its_exit_code(folder):
    with WorkerProcesses(folder, _commands(_fails(0, folder, consequence=False))) as processes:
        _until(processes.all_done, "its end")
        assert processes.failure().cause == "ValueError: reason 0"


def test_cause_is_reported_even_if_a_consequence_ends_first(folder, monkeypatch):
    monkeypatch.setattr("echelon.start.processes._SETTLE_S", 90)
    trigger = folder.error_of(9)
    waits = f"from pathlib import Path\nwhile not Path({str(trigger)!r}).exists(): pass\n"
    programs = [
        waits + _fails(0, folder, consequence=True),
        _fails(1, folder, consequence=False, after=9),
    ]
    with WorkerProcesses(folder, _commands(*programs)) as processes:
        _said(folder, 1)
        trigger.touch()
        _until(processes.exit_codes, "the consequence to end")
        assert processes.failure().rank == 1


def test_consequence_is_reported_if_no_cause_is_found(folder):
    with WorkerProcesses(folder, _commands(_fails(0, folder, consequence=True), SLEEP)) as processes:
        _until(processes.exit_codes, "the consequence to end")
        assert processes.failure().rank == 0


def test_error_of_a_worker_that_is_slow_to_exit_is_reported_before_its_end(folder, monkeypatch):
    monkeypatch.setattr("echelon.start.processes._LAST_LOGS_S", 0)
    slow = _fails(1, folder, consequence=False).replace("sys.exit(1)", "time.sleep(250)")
    with WorkerProcesses(folder, _commands(_fails(0, folder, consequence=True), slow)) as processes:
        _until(folder.error_of(1).exists, "the error of the slow worker")
        _until(processes.exit_codes, "the consequence to end")
        assert processes.failure().rank == 1
        assert 1 not in processes.exit_codes()


def test_a_damaged_reason_falls_back_to_the_exit_code(folder):
    folder.error_of(0).write_bytes(b'{"rank": 0, "t"')
    with WorkerProcesses(folder, _commands("raise SystemExit(4)")) as processes:
        _until(processes.all_done, "its end")
        assert "exit code 4" in processes.failure().cause


def test_leaving_the_context_ends_workers_and_their_child_processes(folder):
    with WorkerProcesses(folder, _commands(PARENT + SLEEP, PARENT + "raise SystemExit(0)")) as processes:
        started = [int(_said(folder, rank)) for rank in (0, 1)]
        _until(lambda: 1 in processes.exit_codes(), "the second to end before its child")
        assert not any(map(_is_gone, started))
        workers = processes.pids_on("n0")
    assert all(map(_is_gone, workers))
    _until(lambda: all(map(_is_gone, started)), "the grandchildren to be gone")


def test_worker_that_ignores_sigterm_is_killed(folder):
    with WorkerProcesses(folder, _commands(STUBBORN)) as processes:
        _said(folder, 0)
    assert processes.exit_codes() == {0: -signal.SIGKILL}


def test_a_worker_that_was_stopped_is_ended_too(folder):
    with WorkerProcesses(folder, _commands(SAY_AND_SLEEP)) as processes:
        _said(folder, 0)
        (pid,) = processes.pids_on("n0")
        os.kill(pid, signal.SIGSTOP)
        _until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T", "it to be stopped")
        processes.end(grace_s=120)
    assert processes.exit_codes() == {0: -signal.SIGTERM}


def test_workers_may_clean_up_when_they_are_asked_to_end(folder):
    program = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('tidy', flush=True), sys.exit(0)))\n"
        "print('here', flush=True)\n"
        "signal.pause()\n"
    )
    with WorkerProcesses(folder, _commands(program)) as processes:
        _said(folder, 0)
        processes.end(grace_s=120)
        assert processes.exit_codes() == {0: 0}
    assert folder.log_of(0).read_text() == "here\ntidy\n"


def test_ctrl_c_reaches_every_worker(folder):
    program = f"try: {SAY_AND_SLEEP}\nexcept KeyboardInterrupt: print('bye')"
    with WorkerProcesses(folder, _commands(program, program)) as processes:
        for rank in (0, 1):
            _said(folder, rank)
        processes.interrupt()
        _until(processes.all_done, "both to end")
        assert processes.exit_codes() == {0: 0, 1: 0}
    assert folder.log_of(1).read_text() == "here\nbye\n"


def test_terminal_ctrl_c_to_the_launcher_does_not_reach_the_workers(folder):
    with WorkerProcesses(folder, _commands(SLEEP)) as processes:
        (pid,) = processes.pids_on("n0")
        assert os.getpgid(pid) == pid != os.getpgid(0)


def test_ending_twice_is_harmless(folder):
    with WorkerProcesses(folder, _commands(SLEEP)) as processes:
        processes.end()
        processes.end()
    assert processes.all_done()


def test_a_program_that_does_not_exist_is_a_launch_error_and_ends_those_that_were_started(folder):
    missing = WorkerCommand(rank=1, node="n7", argv=["/no/such/program", "x"], env={})
    pid = folder.path / "pid"
    first = _commands(f"import os; print(os.getpid(), file=open({str(pid)!r}, 'w'), flush=True); {SLEEP}")
    with pytest.raises(LaunchError, match="rank 1 on n7 could not be started") as caught:
        WorkerProcesses(folder, [*first, missing])
    assert "/no/such/program" in caught.value.where
    if pid.exists() and pid.read_text():  # it may have been ended before it could write
        assert _is_gone(int(pid.read_text()))
