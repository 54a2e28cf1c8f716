"""Runs every policy with every seed, in this process or in several at once; what comes out is the same.

Each run is a function of the setting, the policy and the seed (`run.py`), so it does not matter where it is
made, or when. Events are written by whoever makes the run, each run's to a file of its own, and put
together in the order of the runs.
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

from echelon.errors import ConfigError, EchelonError, LaunchError
from echelon.observe.events import AnyEvent, encode
from echelon.simulate.outcome import Run, SimulationResult
from echelon.simulate.profile import measure
from echelon.simulate.setting import Setting
from echelon.sync.policy import POLICIES

# What needs torch is imported where it is used: mistakes are told without waiting for it.
if TYPE_CHECKING:
    from echelon.simulate.learner import Problem
    from echelon.simulate.scene import Listener

Progress = Callable[[int, float], None]
_TOLD_TIMES = 100  # how often a run tells how far it is


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
    """As `simulate`, in up to `jobs` processes.

    `progress` hears which run (from 0) is at which virtual second. `events` are written as JSON lines, each
    with its policy and seed.
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
    """Refuse what cannot work before anything is loaded or run."""
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
            listeners.append(_telling(setting, task, progress))
        if task.events is not None:
            file = stack.enter_context(task.events.open("wb"))
            # What an event does not know: readers of events pass over it.
            whose = msgspec.json.encode({"policy": task.policy, "seed": task.seed})[:-1] + b","
            listeners.append(lambda event: _write(file.write, whose, event))
        yield listeners


def _write(write: Callable[[bytes], object], whose: bytes, event: AnyEvent) -> None:
    write(whose + encode(event)[1:] + b"\n")


def _telling(setting: Setting, task: _Task, progress: Progress) -> Listener:
    told_s = 0.0

    def tell(event: AnyEvent) -> None:
        nonlocal told_s
        if event.t - told_s >= setting.seconds / _TOLD_TIMES:
            told_s = event.t
            progress(task.number, event.t)

    return tell


def _all(listeners: Sequence[Listener]) -> Listener | None:
    """One that tells all; none if there are none, for then events need not be made."""
    if len(listeners) < 2:
        return listeners[0] if listeners else None

    def tell(event: AnyEvent) -> None:
        for listener in listeners:
            listener(event)

    return tell


# All runs


def _here(setting: Setting, tasks: Sequence[_Task], progress: Progress | None) -> Iterator[tuple[int, Run]]:
    from echelon.simulate.learner import Problem

    problem = Problem(setting)
    for task in tasks:
        yield task.number, _make(setting, problem, task, progress)


def _apart(
    setting: Setting, tasks: Sequence[_Task], jobs: int, progress: Progress | None
) -> Iterator[tuple[int, Run]]:
    """Whoever is free gets the next task. All processes are ended, whatever happens."""
    context = multiprocessing.get_context("spawn")  # torch does not survive a fork in all its parts
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
                said = _heard(ready, processes[ready])
                if isinstance(said, EchelonError):
                    raise said
                number, what = said
                if isinstance(what, float):
                    if progress is not None:
                        progress(number, what)
                    continue
                yield number, what
                missing -= 1
                ready.send(left.pop() if left else None)
                if len(busy) > missing:  # it was sent home: its end of the line is no failure
                    busy.discard(ready)
    finally:
        for connection, ended in processes.items():
            connection.close()
            ended.terminate()
            ended.join()


_Said = tuple[int, "float | Run"] | EchelonError


def _heard(connection: Connection, process: multiprocessing.process.BaseProcess) -> _Said:
    try:
        said: _Said = connection.recv()
    except (EOFError, ConnectionError):
        process.join()
        raise LaunchError(
            f"a process that simulated has ended with exit code {process.exitcode}",
            where="echelon simulate",
            fix="use fewer processes, --jobs 1, if memory is short",
        ) from None
    return said


def _work(connection: Connection, setting: Setting, tells: bool) -> None:
    """A process: makes one run after the other, until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it will end it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from echelon.simulate.learner import Problem

    def progress(number: int, seconds: float) -> None:
        connection.send((number, seconds))

    with suppress(EOFError, BrokenPipeError):
        try:
            problem: Problem | None = None
            while (task := connection.recv()) is not None:
                problem = problem or Problem(setting)
                connection.send((task.number, _make(setting, problem, task, progress if tells else None)))
        except EchelonError as error:
            connection.send(error)


def _end_with_parent() -> None:
    """One that was killed cannot end others; nobody would want their runs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# Events


def _folder_beside(file: Path) -> tempfile.TemporaryDirectory[str]:
    """On the same disk, so that putting the whole file in its place is one step."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(EISDIR, "it is a folder")
        return tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise ConfigError(
            f"cannot write {file.name}: {error.strerror}",
            where=str(file.parent),
            fix="make room there, or give another place with --events",
        ) from error


def _join(parts: Iterable[Path], file: Path) -> None:
    first, *others = parts
    with first.open("ab") as whole:
        for part in others:
            with part.open("rb") as lines:
                shutil.copyfileobj(lines, whole)
    first.replace(file)
