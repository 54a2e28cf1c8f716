"""`echelon.launch`: run a function on several workers, from a program or a notebook; returns its results.

It does what `echelon run` does, with a function in place of a script: the same settings, launchers, record
and errors. The workers are fresh processes, so it does not matter what the calling process has done before.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunSettings
from echelon.config.units import show_bytes, show_seconds
from echelon.errors import ConfigError, FunctionFailed, LaunchError
from echelon.observe.events import AnyEvent
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.call import Returned, packed
from echelon.start.layout_choice import chosen_layout
from echelon.start.local_choice import chosen_way
from echelon.start.run import RunResult, Target, run
from echelon.start.watching import Watcher

R = TypeVar("R")
_MOST_BYTES = 200_000_000


def launch(
    function: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    workers: int | None = None,
    on: str | None = None,
    hosts: str | None = None,
    quiet: bool = False,
    **settings: Any,
) -> list[R]:
    """Run a function on several workers; returns what it returned on each, by rank.

    function   calls `echelon.join()` and trains; it and its arguments are pickled with cloudpickle
    args       its arguments, the same on every worker
    kwargs     its arguments by name
    workers    how many workers; default: one, or all slots of the hosts
    on         what starts them: local, ssh, mpi, slurm, ray, spark, dask; see `echelon list launcher`
    hosts      machines, with workers on each: "a:2,b:4"
    quiet      do not show what the leader prints, nor how the run goes
    settings   those of `echelon run`, by the same names: sync, codec, shares, servers, name, copy, ...

    A worker's failure raises FunctionFailed, which names the worker; its `__cause__` is the worker's own
    exception. Ctrl-C ends all workers and raises KeyboardInterrupt. Example:

        accuracies = echelon.launch(train, (model, 10), workers=4)
    """
    if not callable(function):
        raise ConfigError(
            f"{function!r} is not a function", where="launch", fix="give the function, not what it returns"
        )
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise ConfigError(
            f"args is {args!r}, which is not a tuple",
            where="launch",
            fix="launch(train, (model,), workers=4)",
        )
    given = {"workers": workers, "on": on, "hosts": hosts, **settings}
    resolved = resolve(RunSettings, {name: value for name, value in given.items() if value is not None})
    watcher = QuietWatcher() if quiet else _FunctionWatcher()
    return call_on_workers(function, args, kwargs or {}, resolved, watcher)


def call_on_workers(
    function: Callable[..., R],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    resolved: Resolved[RunSettings],
    watcher: Watcher,
) -> list[R]:
    """As `launch`, with settings that are resolved already, and shown by any watcher."""
    name = getattr(function, "__name__", type(function).__name__)
    call = packed(function, args, kwargs)
    if len(call) > _MOST_BYTES:
        raise LaunchError(
            f"the function and its arguments have {show_bytes(len(call))}, too much to send to workers",
            where="launch",
            fix="load the data inside of the function, or pass a path",
        )
    target = Target(argv=["-m", "echelon.start.call"], name=name.strip("<>"), call=call)
    local = chosen_way(resolved, target, lambda text: None)
    layout = chosen_layout(local.resolved, target, lambda text: None)
    outcome = run(layout.resolved, target, watcher, [*local.notes, *layout.notes])
    try:
        return _results(outcome)
    finally:
        shutil.rmtree(outcome.folder.results, ignore_errors=True)


def _results(outcome: RunResult) -> list[Any]:
    failure = outcome.failure
    if failure is not None:
        told = _read(outcome.folder, failure.rank)
        error = FunctionFailed(
            failure.sentence(outcome.node),
            ranks=(failure.rank, *outcome.alike),
            where=str(outcome.folder.log_of(failure.rank)),
        )
        if failure.text:
            error.add_note(f"rank {failure.rank} printed:\n{failure.text}")
        raise error from (told.error if told else None)
    if outcome.code == 128 + signal.SIGINT:
        raise KeyboardInterrupt
    if outcome.code:
        raise LaunchError(f"the run was ended by signal {outcome.code - 128}", where=outcome.folder.name)
    returned = [_read(outcome.folder, rank) for rank in range(outcome.workers)]
    missing = [rank for rank, one in enumerate(returned) if one is None]
    if missing:
        raise FunctionFailed(
            f"rank {missing[0]} ended without a result: the function ended the process",
            ranks=tuple(missing),
            where=str(outcome.folder.log_of(missing[0])),
            fix="return from the function, and do not call sys.exit()",
        )
    return [one.value for one in returned if one is not None]


def _read(folder: RunFolder, rank: int) -> Returned | None:
    try:
        data = folder.result_of(rank).read_bytes()
    except FileNotFoundError:
        return None
    try:
        returned = pickle.loads(data)
    except Exception as error:
        raise LaunchError(
            f"what rank {rank} returned cannot be unpickled: {type(error).__name__}: {error}",
            where="launch",
            fix="return plain values or tensors",
        ) from error
    return returned if isinstance(returned, Returned) else None


class QuietWatcher:
    """Shows nothing."""

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        """Not shown."""

    def joined(self, seconds: float) -> None:
        """Not shown."""

    def output(self, data: bytes) -> None:
        """Not shown."""

    def events(self, events: Sequence[AnyEvent]) -> None:
        """Not shown."""


class _FunctionWatcher(QuietWatcher):
    """Shows the leader's output, on whatever the program's output is: a terminal, or a notebook's cell."""

    def __init__(self) -> None:
        self._count = 0

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        """Say where the record is."""
        self._count = len(plan.workers)
        workers = f"{self._count} worker{'s' if self._count > 1 else ''}"
        nodes = list(dict.fromkeys(worker.node for worker in plan.workers))
        place = folder.path
        with contextlib.suppress(ValueError):
            place = place.relative_to(Path.cwd())
        self._say(f"starting {workers} on {', '.join(nodes)}; record in {place}")
        for note in notes:
            self._say(f"note: {note}")

    def joined(self, seconds: float) -> None:
        """Say how long it took."""
        self._say(
            f"{self._count} worker{'s' if self._count > 1 else ''} joined after {show_seconds(seconds)}"
        )

    def output(self, data: bytes) -> None:
        """Show it as it is."""
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()

    def _say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
