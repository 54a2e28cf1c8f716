"""Runs every policy with every seed, in this process or in several; the result is the same.

Each run is a function of the setting, the policy and the seed (`run.py`), so it does not matter which
process runs it, or when. Each run's events are written to a file of their own; the files are joined in the
order of the runs.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from errno import EISDIR
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from echelon.config.allowed import allow_names_in
from echelon.errors import ConfigError, EchelonError, LaunchError
from echelon.observe.events import AnyEvent, encode
from echelon.simulate.outcome import Run, SimulationResult
from echelon.simulate.profile import measure
from echelon.simulate.setting import Setting
from echelon.sync.policy import POLICIES

# torch is imported where it is used, so that mistakes are reported without waiting for it.
if TYPE_CHECKING:
    from echelon.simulate.learner import Problem
    from echelon.simulate.virtual import Listener

Progress = Callable[[int, float], None]
_REPORTS = 100  # progress reports per run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    number: int
    policy: str
    seed: int
    events: Path | None


def simulate_several(
    setting: Setting,
    policies: Sequence[str],
    *,
    jobs: int = 1,
    events: Path | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Like `simulate`, in up to `jobs` processes.

    `progress` is called with a run's number (from 0) and its virtual time. `events` are written as JSON
    lines, each with its policy and seed.
    """
    check_policies(setting, policies)
    profile = setting.profile or measure(setting)
    known = replace(setting, profile=profile)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(_folder_beside(events))) if events is not None else None
        tasks = _tasks(setting, policies, folder)
        jobs = min(jobs, len(tasks))
        made = dict(_here(known, tasks, progress) if jobs == 1 else _apart(known, tasks, jobs, progress))
        if events is not None:
            _join((task.events for task in tasks if task.events is not None), events)
    return SimulationResult(
        setting=setting, profile=profile, runs=tuple(made[task.number] for task in tasks)
    )


def check_policies(setting: Setting, policies: Sequence[str]) -> None:
    """Raise ConfigError for a policy that cannot work, before anything is loaded."""
    if not policies:
        raise ConfigError("no policy to simulate", where="--sync", fix="give one: --sync full")
    for index, text in enumerate(policies):
        if text in policies[:index]:
            raise ConfigError(f"{text} is given twice", where="--sync", fix="give it once")
        POLICIES.build(text, where="--sync").resolved().check(setting.cluster)


def _tasks(setting: Setting, policies: Sequence[str], folder: Path | None) -> list[_Task]:
    seeds = range(setting.seed, setting.seed + setting.seeds)
    asked = enumerate((policy, seed) for policy in policies for seed in seeds)
    return [
        _Task(
            number=number,
            policy=policy,
            seed=seed,
            events=folder / f"{number}.jsonl" if folder is not None else None,
        )
        for number, (policy, seed) in asked
    ]


# One run


def _make(setting: Setting, problem: Problem, task: _Task, progress: Progress | None) -> Run:
    from echelon.simulate.run import run_policy

    assert setting.profile is not None
    policy = POLICIES.build(task.policy, where="--sync").resolved()
    with _listeners(setting, task, progress) as listeners:
        run = run_policy(
            setting,
            policy,
            problem,
            setting.profile,
            task.seed,
            text=task.policy,
            listener=_all(listeners),
        )
    if progress is not None:
        progress(task.number, setting.seconds)
    return run


@contextmanager
def _listeners(setting: Setting, task: _Task, progress: Progress | None) -> Iterator[list[Listener]]:
    with ExitStack() as stack:
        listeners: list[Listener] = []
        if progress is not None:
            listeners.append(_progress_listener(setting, task, progress))
        if task.events is not None:
            file = stack.enter_context(task.events.open("wb"))
            # Policy and seed are no fields of events; readers of events ignore them.
            whose = msgspec.json.encode({"policy": task.policy, "seed": task.seed})[:-1] + b","
            listeners.append(lambda event: _write(file.write, whose, event))
        yield listeners


def _write(write: Callable[[bytes], object], whose: bytes, event: AnyEvent) -> None:
    write(whose + encode(event)[1:] + b"\n")


def _progress_listener(setting: Setting, task: _Task, progress: Progress) -> Listener:
    reported_s = 0.0

    def listen(event: AnyEvent) -> None:
        nonlocal reported_s
        if event.t - reported_s >= setting.seconds / _REPORTS:
            reported_s = event.t
            progress(task.number, event.t)

    return listen


def _all(listeners: Sequence[Listener]) -> Listener | None:
    """One listener that calls all; None if there are none, so that no events are made."""
    if len(listeners) < 2:
        return listeners[0] if listeners else None

    def listen(event: AnyEvent) -> None:
        for listener in listeners:
            listener(event)

    return listen


# All runs


def _here(setting: Setting, tasks: Sequence[_Task], progress: Progress | None) -> Iterator[tuple[int, Run]]:
    from echelon.simulate.learner import Problem

    problem = Problem(setting)
    for task in tasks:
        yield task.number, _make(setting, problem, task, progress)


def _apart(
    setting: Setting, tasks: Sequence[_Task], jobs: int, progress: Progress | None
) -> Iterator[tuple[int, Run]]:
    """Run tasks in several processes; each takes the next task when free. Always ends all processes."""
    context = multiprocessing.get_context("spawn")  # parts of torch do not work after a fork
    left = list(reversed(tasks))
    processes: dict[Connection, multiprocessing.process.BaseProcess] = {}
    try:
        for _ in range(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, setting, progress is not None), daemon=True
            )
            process.start()
            theirs.close()
            processes[ours] = process
            ours.send(left.pop())
        missing = len(tasks)
        busy = set(processes)
        while missing:
            for ready in wait(busy):
                assert isinstance(ready, Connection)
                message = _receive(ready, processes[ready])
                if isinstance(message, EchelonError):
                    raise message
                number, what = message
                if isinstance(what, float):
                    if progress is not None:
                        progress(number, what)
                    continue
                yield number, what
                missing -= 1
                ready.send(left.pop() if left else None)
                if len(busy) > missing:  # it got no task and will close its connection
                    busy.discard(ready)
    finally:
        for connection, ended in processes.items():
            connection.close()
            ended.terminate()
            ended.join()


_Message = tuple[int, "float | Run"] | EchelonError


def _receive(connection: Connection, process: multiprocessing.process.BaseProcess) -> _Message:
    try:
        message: _Message = connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise LaunchError(
            f"a simulation process ended with exit code {process.exitcode}",
            where="echelon simulate",
            fix="if memory is short, use fewer processes: --jobs 1",
        ) from None
    return message


def _work(connection: Connection, setting: Setting, reports: bool) -> None:
    """The main function of a process: runs one task after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from echelon.simulate.learner import Problem

    # The parent was given these names, and has built what they name.
    allow_names_in(setting.delay, setting.jitter, setting.model, setting.data)

    def progress(number: int, seconds: float) -> None:
        connection.send((number, seconds))

    with suppress(EOFError, BrokenPipeError):
        try:
            problem: Problem | None = None
            while (task := connection.recv()) is not None:
                allow_names_in(task.policy)
                problem = problem or Problem(setting)
                connection.send((task.number, _make(setting, problem, task, progress if reports else None)))
        except EchelonError as error:
            connection.send(error)


def _end_with_parent() -> None:
    """End this process if the parent dies, because a killed parent cannot end it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# Events


def _folder_beside(file: Path) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the same disk, so that the complete file can be moved atomically."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        return tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file.name}: {error.strerror}",
            where=str(file.parent),
            fix="free some disk space or check permissions, or choose another file with --events",
        ) from error


def _join(parts: Iterable[Path], file: Path) -> None:
    first, *others = parts
    with first.open("ab") as whole:
        for part in others:
            with part.open("rb") as lines:
                shutil.copyfileobj(lines, whole)
    first.replace(file)
