"""Real `echelon run` and `echelon train`: what they print, how they fail, end and train."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from echelon.config.resolve import resolve
from echelon.config.schema import TrainSettings
from echelon.observe.events import (
    CheckpointLoaded,
    EpochEnded,
    Evaluated,
    RunEnded,
    RunStarted,
    StepEnded,
    WorkerFailed,
    read_events,
)
from echelon.observe.run_folder import RunFolder
from echelon.observe.summary import Summary
from echelon.plan.plan import Plan
from terminal import Terminal

HOST = socket.gethostname()
ECHELON = (sys.executable, "-m", "echelon")
ENVIRONMENT = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}

PRINTS = """
import os, sys, beside
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv, __name__, flush=True)
print("threads", os.environ["OMP_NUM_THREADS"], repr(sys.stdin.read()), file=sys.stderr)
"""

# Rank 1 fails as the first argument says; the others wait for it until they are told.
LEAVES = """
import os, signal, sys, echelon
session = echelon.join(timeout_s=120)
print("joined", flush=True)
session.barrier()
if session.rank == 1:
    if sys.argv[1] == "raise":
        raise ValueError("main.cpp:100: [red]broken[/red]")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(3)
session.barrier()
"""

# Each worker says who it is, and which process it has started, then sleeps.
SLEEPS = """
import os, signal, subprocess, sys, time
if sys.argv[1:] == ["stubborn"]:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(250)"], stderr=subprocess.DEVNULL,
                         start_new_session=os.environ["RANK"] == "1")
print(os.getpid(), child.pid, flush=True)
try:
    time.sleep(250)
except KeyboardInterrupt:
    print("interrupted")
"""

TRAINS = """
import echelon, torch
from torch.utils.data import DataLoader, TensorDataset
session = echelon.join()
torch.manual_seed(3)
data = TensorDataset(torch.randn(50, 4), torch.randn(50, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader = session.prepare(model, optimizer, loader)
for epoch in session.epochs(2):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
if session.is_leader:
    print("world", session.world_size, "weight", model.weight.detach().sum().item(), flush=True)
"""


def _echelon(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ECHELON, *args],
        cwd=folder,
        env=ENVIRONMENT,
        input="for the leader",
        capture_output=True,
        text=True,
        timeout=240,
    )


def _script(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return name


def _only_run(folder: Path) -> RunFolder:
    (path,) = (folder / "runs").iterdir()
    return RunFolder(path)


def _summary(run: RunFolder) -> Summary:
    return msgspec.json.decode(run.summary.read_bytes(), type=Summary)


@pytest.fixture
def terminal(tmp_path) -> Iterator[Callable[..., Terminal]]:
    """Starts `echelon` in a terminal of its own."""
    started = []

    def start(*args: str, **options: int) -> Terminal:
        started.append(Terminal([*ECHELON, *args], cwd=tmp_path, env=ENVIRONMENT, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def _of(kind: type, file: Path) -> list:
    return [event for event in read_events(file) if isinstance(event, kind)]


def _ended(run: RunFolder) -> RunEnded:
    (ended,) = _of(RunEnded, run.events_of(-1))
    return ended


def _processes_of(folder: Path) -> list[int]:
    """Processes of this folder's runs, found by the environment variable that they inherit."""
    mark = f"ECHELON_RUN={folder}/".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue  # it has ended, or is not ours
    return found


def _is_of_launch(pid: int) -> bool:
    """Whether it is a worker, or the template that workers are forked from."""
    return b"echelon.start." in Path(f"/proc/{pid}/cmdline").read_bytes()


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited 120 s for: {what}"
        time.sleep(0.02)


# Scripts and their output


def test_leaders_output_is_shown_and_all_output_is_logged_and_the_run_is_recorded(tmp_path):
    script = _script(tmp_path, PRINTS, "deep/prints.py")
    _script(tmp_path, "", "deep/beside.py")
    args = ["--workers", "7", "-m", "x y", "--help"]
    done = _echelon(tmp_path, "run", "--workers", "3", "--threads", "2", script, *args)
    assert done.returncode == 0, done.stderr
    leader = f"rank 0 of 3 {[script, *args]} __main__\nthreads 2 'for the leader'\n"
    assert done.stdout == leader
    run = _only_run(tmp_path)
    assert run.log_of(0).read_text() == leader
    for rank in (1, 2):
        printed = leader.replace("rank 0", f"rank {rank}").replace("for the leader", "")
        assert run.log_of(rank).read_text() == printed
    first, told, _, last = done.stderr.splitlines()
    assert first == f"starting 3 workers, 2 threads each; record in runs/{run.name}"
    assert "the script did not call echelon.join(): each of the 3 workers ran all of it" in told
    assert "Fix: join in the script" in told
    assert last == f"picture: echelon report runs/{run.name}"
    assert run.name.endswith("-prints")
    (started,) = _of(RunStarted, run.events_of(-1))
    assert (started.run, started.world_size, started.command[-5:]) == (run.name, 3, args)
    assert _ended(run).outcome == _summary(run).outcome == "completed"
    plan = Plan.read(run.plan)
    assert (plan.run, [worker.node for worker in plan.workers]) == (run.name, [HOST] * 3)
    assert resolve(TrainSettings, {}, run.config).settings.workers == 3


def test_module_runs_as_python_m_runs_it(tmp_path):
    _script(
        tmp_path, PRINTS.replace("import os, sys, beside", "import os, sys, pack.other"), "pack/main.py"
    )
    _script(tmp_path, "", "pack/other.py")
    done = _echelon(tmp_path, "run", "-m", "pack.main", "--workers", "3")
    assert done.returncode == 0, done.stderr
    assert f"rank 0 of 1 {[str(tmp_path / 'pack/main.py'), '--workers', '3']} __main__" in done.stdout


def test_missing_module_fails_without_a_traceback(tmp_path):
    done = _echelon(tmp_path, "run", "-m", "no_such_module")
    assert done.returncode == 2
    assert "no_such_module" in done.stderr
    assert "Traceback" not in done.stderr


def test_error_already_shown_on_the_terminal_is_not_repeated(tmp_path, terminal):
    shown = terminal("run", _script(tmp_path, "raise ValueError('once')"))
    assert shown.end() == 1
    assert shown.shown.count("Traceback") == 1
    assert shown.shown.splitlines()[-2] == f"rank 0 on {HOST} failed: ValueError: once"


def test_error_is_printed_once_on_stderr_and_not_on_stdout(tmp_path):
    script = "import atexit\natexit.register(print, 'goodbye')\nprint('before')\nraise ValueError('once')"
    done = _echelon(tmp_path, "run", _script(tmp_path, script))
    assert done.stdout == "before\ngoodbye\n"
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-2] == f"rank 0 on {HOST} failed: ValueError: once"
    assert "Traceback" in _only_run(tmp_path).log_of(0).read_text()


def test_exit_message_of_the_leader_is_printed_once(tmp_path):
    done = _echelon(tmp_path, "run", _script(tmp_path, "import sys\nsys.exit('no data here')"))
    assert (done.returncode, (done.stdout + done.stderr).count("no data here")) == (1, 1)


# How workers start

TELLS = """
import os, sys, threading
import torch
name, = (key for key in os.environ if key.startswith("ODD"))
print(os.getpid() == os.getsid(0) == os.getpgid(0), threading.active_count(), torch.get_num_threads())
print(sys.argv[0], __name__, sys.path[0], os.getcwd(), os.environb[os.fsencode(name)])
print(float(torch.ones(300, 300).matmul(torch.ones(300, 300)).sum()))
"""


@pytest.mark.parametrize("start", ["fork", "exec"])
def test_worker_state_is_the_same_whether_forked_or_started_by_exec(tmp_path, start):
    script = _script(tmp_path, TELLS, "deep/tells.py")
    done = subprocess.run(
        [*ECHELON, "run", "--workers", "2", "--start", start, "--threads", "2", script],
        cwd=tmp_path,
        env={**os.environb, b"ODD\xff": b"\xfe"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    run = _only_run(tmp_path)
    for rank in (0, 1):
        head, place, numbers = run.log_of(rank).read_text().splitlines()
        assert head == "True 1 2"
        assert place == f"{script} __main__ {tmp_path / 'deep'} {tmp_path} b'\\xfe'"
        assert float(numbers) == 300.0**3


def test_forked_workers_do_not_draw_the_same_random_numbers(tmp_path):
    script = "import random, numpy, torch\n" + "\n".join(
        f"print({name})" for name in ("random.random()", "numpy.random.random()", "torch.initial_seed()")
    )
    done = _echelon(tmp_path, "run", "--workers", "3", _script(tmp_path, script))
    assert done.returncode == 0, done.stderr
    run = _only_run(tmp_path)
    drawn = [number for rank in range(3) for number in run.log_of(rank).read_text().split()]
    assert len(set(drawn)) == 9


def test_workers_are_started_by_exec_if_the_template_cannot_fork(tmp_path):
    """A module of the user's that starts a thread as soon as Python starts."""
    _script(
        tmp_path, "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "site/sitecustomize.py",
    )  # fmt: skip
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*ECHELON, "run", "--workers", "2", _script(tmp_path, "import sys\nprint(sys.orig_argv)")],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert "echelon.start.worker" in _only_run(tmp_path).log_of(rank).read_text()


def test_workers_end_if_the_template_is_killed(tmp_path, sleeping):
    launcher, pids = sleeping()
    (template,) = {pid for pid in _processes_of(tmp_path) if _is_of_launch(pid)} - set(pids)
    os.kill(template, signal.SIGKILL)
    launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert _processes_of(tmp_path) == []


def test_ctrl_c_while_torch_is_imported_ends_the_run(tmp_path):
    launcher = subprocess.Popen(
        [*ECHELON, "run", "--workers", "2", _script(tmp_path, SLEEPS)],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _until(lambda: any(map(_is_of_launch, _processes_of(tmp_path))), "the template to start")
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 130, err
    assert _processes_of(tmp_path) == []
    assert "Traceback" not in err


# Failures


def _leaves(folder: Path, how: str, workers: int) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    done = _echelon(folder, "run", "--workers", str(workers), _script(folder, LEAVES), how)
    assert _processes_of(folder) == []
    return done, _only_run(folder)


def test_worker_that_raises_ends_the_run_and_its_error_is_printed_last(tmp_path):
    done, run = _leaves(tmp_path, "raise", 3)
    assert done.returncode == 1
    cause = "ValueError: main.cpp:100: [red]broken[/red]"
    *_, raised, error, failed, log = done.stderr.splitlines()
    assert raised.strip() == 'raise ValueError("main.cpp:100: [red]broken[/red]")'
    assert error == cause
    assert failed == f"rank 1 on {HOST} failed: {cause}"
    assert log == f"  log: runs/{run.name}/logs/rank-1.log"
    assert "echelon/launch" not in done.stderr
    (event,) = _of(WorkerFailed, run.events_of(-1))
    assert (event.failed, event.node, event.cause) == (1, HOST, cause)
    assert (_ended(run).outcome, _ended(run).detail) == ("failed", f"rank 1: {cause}")
    summary = _summary(run)
    assert (summary.outcome, summary.failure) == ("failed", f"rank 1 ({HOST}): {cause}")
    for rank in (0, 2):  # those that had the time to hear the reason say it, too
        told = run.log_of(rank).read_text()
        assert told == "joined\n" or f"rank 1 on {HOST} failed: {cause}" in told


def test_a_worker_that_is_killed_is_named(tmp_path):
    done, run = _leaves(tmp_path, "kill", 2)
    assert done.returncode == 128 + signal.SIGKILL
    *_, heading, printed, failed, _ = done.stderr.splitlines()
    assert (heading, printed) == ("rank 1 printed last:", "joined")
    assert failed.startswith(f"rank 1 on {HOST} failed: killed by SIGKILL")
    assert _summary(run).outcome == "failed"


def test_launcher_exits_with_the_exit_code_of_a_failed_worker(tmp_path):
    done, run = _leaves(tmp_path, "exit", 2)
    assert done.returncode == 3
    told = f"rank 1 on {HOST} failed: ended with exit code 3 and no exception"
    assert done.stderr.splitlines()[-2] == told
    assert "exit code 3" in _summary(run).failure


def test_a_worker_that_never_joins_is_named_within_the_stated_time(tmp_path):
    script = "import os, time, echelon\nif os.environ['RANK'] == '1': time.sleep(250)\nechelon.join()\n"
    done = _echelon(tmp_path, "run", "--workers", "2", "--join-timeout-s", "1.5", _script(tmp_path, script))
    assert done.returncode == 1
    assert "rank 1 of 2 did not join within 1.5 s" in done.stderr
    assert "--join-timeout-s" in done.stderr
    assert _processes_of(tmp_path) == []


# Signals


@pytest.fixture
def sleeping(tmp_path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], list[int]]]]:
    """Starts a launcher whose two workers sleep; gives it and the processes below it."""
    launchers = []

    def start(*args: str) -> tuple[subprocess.Popen[str], list[int]]:
        launcher = subprocess.Popen(
            [*ECHELON, "run", "--workers", "2", _script(tmp_path, SLEEPS), *args],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        launchers.append(launcher)
        logs = tmp_path / "runs"
        _until(
            lambda: sum(log.read_text().count("\n") for log in logs.glob("*/logs/*")) == 2,
            "both workers to say who they are",
        )
        pids = [int(word) for log in logs.glob("*/logs/*") for word in log.read_text().split()]
        assert set(pids) <= set(_processes_of(tmp_path))
        return launcher, pids

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()
    for pid in _processes_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


def test_ctrl_c_ends_workers_and_their_child_processes(tmp_path, sleeping):
    launcher, _ = sleeping()
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 130
    assert _processes_of(tmp_path) == []
    run = _only_run(tmp_path)
    assert err.splitlines()[-1] == f"interrupted; record: runs/{run.name}"
    assert "Traceback" not in err
    assert (_summary(run).outcome, _ended(run).detail) == ("interrupted", "SIGINT")
    assert all("\ninterrupted\n" in run.log_of(rank).read_text() for rank in (0, 1))


def test_workers_that_ignore_ctrl_c_are_killed(tmp_path, sleeping):
    launcher, _ = sleeping("stubborn")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)  # two signals at the same instant would count as one
    launcher.send_signal(signal.SIGINT)  # so as not to wait until the launcher loses patience by itself
    launcher.communicate(timeout=120)
    assert launcher.returncode == 130
    assert _processes_of(tmp_path) == []


def test_sigterm_ends_the_run_like_ctrl_c(tmp_path, sleeping):
    launcher, _ = sleeping()
    launcher.terminate()
    launcher.communicate(timeout=120)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert _processes_of(tmp_path) == []
    assert _ended(_only_run(tmp_path)).detail == "SIGTERM"


def test_workers_and_their_child_processes_die_if_the_launcher_is_killed(tmp_path, sleeping):
    launcher, pids = sleeping()
    ours = _processes_of(tmp_path)
    assert set(ours) >= set(pids)
    launcher.kill()
    launcher.communicate()
    _until(
        lambda: not set(ours) & set(_processes_of(tmp_path)),
        "the workers, their children and the template to die",
    )


# Training


def test_the_same_script_trains_the_same_alone_under_echelon_and_under_torchrun(tmp_path):
    script = _script(tmp_path, TRAINS)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ways = {
        "alone": [sys.executable, script],
        "echelon": [*ECHELON, "run", "--workers", "2", "--shares", "3,1", script],
        "torchrun": [sys.executable, *torchrun, script],
    }
    weights = {}
    for way, command in ways.items():
        done = subprocess.run(
            command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        said = next(line for line in done.stdout.splitlines() if "weight" in line).split()
        assert said[-4:-1] == ["world", "1" if way == "alone" else "2", "weight"]
        weights[way] = float(said[-1])
    assert weights["echelon"] == pytest.approx(weights["alone"], rel=1e-4)
    assert weights["torchrun"] == pytest.approx(weights["alone"], rel=1e-4)
    records = sorted((tmp_path / "runs").iterdir())
    joined = [len(list((path / "events").glob("rank-*.jsonl"))) for path in records]
    assert joined == [2, 2], "alone, no record is kept"


MLP = ("train", "--model", "mlp", "--data", "digits", "--seed", "4")
UNEQUAL = ("--workers", "2", "--speed", "1,0.5", "--shares", "by-speed", "--delay", "constant(0.001)")


def _train(folder: Path, *args: str) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    done = _echelon(folder, *MLP, *args)
    assert done.returncode == 0, done.stderr + done.stdout
    return done, RunFolder(max((folder / "runs").iterdir(), key=lambda path: path.stat().st_ctime_ns))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def unequal(place) -> tuple[subprocess.CompletedProcess[str], RunFolder]:
    """One epoch on two unequal workers, saved."""
    return _train(place, *UNEQUAL, "--epochs", "1", "--checkpoint", "saved")


def test_a_run_leaves_its_settings_plan_events_logs_and_figures(unequal):
    done, run = unequal
    assert {path.name for path in run.path.iterdir()} >= {"config.toml", "plan.toml", "summary.json"}
    assert sorted(p.name for p in run.logs.iterdir()) == ["rank-0.log", "rank-1.log"]
    assert list(run.errors.iterdir()) == []
    settings = resolve(TrainSettings, {}, run.config).settings
    assert (settings.model, settings.workers, settings.seed, settings.speeds) == ("mlp", 2, 4, (1.0, 0.5))
    plan = Plan.read(run.plan)
    assert [(w.weight, w.speed, w.delay) for w in plan.workers] == [
        (1, 1, ""),
        (0.5, 0.5, "constant(0.001)"),
    ]
    shown = done.stdout.splitlines()
    assert shown[0].startswith("starting 2 workers, ")
    assert shown[0].endswith(f"; record in runs/{run.name}")
    assert shown[1].startswith("2 workers joined after ")
    assert shown[-1] == f"picture: echelon report runs/{run.name}"


def test_every_worker_draws_its_share_and_only_the_delayed_one_is_delayed(unequal):
    _, run = unequal
    steps = [_of(StepEnded, run.events_of(rank)) for rank in (0, 1)]
    shares = [{event.share for event in own if event.batch == 64} for own in steps]
    assert shares == [{43}, {21}]
    assert all(a.share + b.share == a.batch == b.batch for a, b in zip(*steps, strict=True))
    summary = _summary(run)
    assert (summary.outcome, summary.world_size, summary.epochs) == ("completed", 2, 1)
    assert [worker.samples for worker in summary.workers] == [sum(e.share for e in own) for own in steps]
    assert [worker.delay_s > 0 for worker in summary.workers] == [False, True]
    assert all(worker.sent_bytes > 0 for worker in summary.workers)
    assert summary.accuracy is not None
    assert summary.accuracy > 0.5  # of ten classes, after one epoch
    assert summary.train_loss is not None


def test_resumed_training_ends_with_the_result_of_a_single_worker(place, unequal):
    _, first = unequal
    _, second = _train(place, *UNEQUAL, "--epochs", "2", "--checkpoint", "saved", "--loader-workers", "1")
    _, alone = _train(place, "--threads", "1", "--epochs", "2")
    assert [event.epoch for event in _of(EpochEnded, first.events_of(0))] == [0]
    assert [event.epoch for event in _of(EpochEnded, second.events_of(0))] == [1]
    (loaded,) = _of(CheckpointLoaded, second.events_of(0))
    assert loaded.step == _summary(first).steps
    assert _summary(second).steps == _summary(first).steps
    assert _summary(alone).steps == 2 * _summary(first).steps
    measured = [_of(Evaluated, run.events_of(0)) for run in (first, second, alone)]
    together, by_itself = [*measured[0], *measured[1]], measured[2]
    assert [event.epoch for event in together] == [event.epoch for event in by_itself] == [0, 1]
    for here, there in zip(together, by_itself, strict=True):
        assert here.loss == pytest.approx(there.loss, rel=1e-4)
        assert here.samples == there.samples
    assert _summary(second).test_loss == pytest.approx(_summary(alone).test_loss, rel=1e-4)
    assert _summary(second).test_loss < _summary(first).test_loss


def test_resuming_a_finished_training_does_nothing_and_says_so(place, unequal):
    done, run = _train(place, "--threads", "1", "--epochs", "1", "--checkpoint", "saved")
    assert _summary(run).steps == 0
    assert "nothing to train" in done.stdout
