"""Where are the workers that others wait for, or that go on without the others? Asks, and says it.

What it means is decided in lingering.py. Stacks are those of workers on this machine; what other workers do
is known from their own answers.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from echelon.observe import readiness, stacks
from echelon.observe.events import LAUNCHER, AnyEvent, Noted, StepEnded, WorkersAwaited
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.failure import Failure
from echelon.start.lingering import Lingering, never_joined

_STACK_S = 4.0


class Watched(Protocol):
    """The workers of a run, as far as it is to be known here."""

    @property
    def size(self) -> int:
        """How many there are."""

    def exit_codes(self) -> dict[int, int]:
        """Of those that have ended."""

    def node_of(self, rank: int) -> str:
        """Where a worker is."""

    def pid_of(self, rank: int) -> int | None:
        """Its process, if it is on this machine."""


class Whereabouts:
    """Follows one run; `recorder` is the launcher's."""

    def __init__(self, folder: RunFolder, plan: Plan, recorder: Recorder) -> None:
        self._folder = folder
        self._workers = len(plan.workers)
        self._recorder = recorder
        self._lingering = Lingering(self._workers, plan.round_timeout_s)
        self._events: dict[int, int] = {}  # how many each rank has recorded
        self._awaited: dict[int, float] = {}  # for how long, by rank
        self._said: dict[int, tuple[str, float]] = {}  # where an awaited worker was, after which wait

    def take(self, event: AnyEvent) -> None:
        """Take an event into account."""
        self._events[event.rank] = self._events.get(event.rank, 0) + 1
        if isinstance(event, WorkersAwaited):
            self._awaited = dict.fromkeys(event.awaited, event.t - event.since)
        elif isinstance(event, StepEnded) and self._awaited:
            self._awaited.clear()
            self._said.clear()

    def look(self, workers: Watched, absent: frozenset[int] = frozenset()) -> Failure | None:
        """Say where awaited workers are; returns the failure of one that ends or goes on without others.

        absent  workers without which the others go on
        """
        self._say_awaited(workers)
        codes = {rank: code for rank, code in workers.exit_codes().items() if rank not in absent}
        if not codes or len(codes) == workers.size:
            return None
        told = readiness.told(self._folder)
        phases = {rank: phase for rank, phase in told.items() if rank not in absent}
        failure = never_joined(codes, phases, self._workers)
        if failure is not None:
            return failure
        signs = {rank: (self._events.get(rank), _size(self._folder.log_of(rank))) for rank in phases}
        found = self._lingering.look(codes, phases, signs, time.monotonic())
        if found is None:
            return None
        where = self._where(workers, found.rank)
        said = (
            f"goes on though other workers have ended, and has neither printed nor recorded anything for "
            f"{found.silent_s:.0f} s{where}"
        )
        if not found.over:
            self._warn(f"rank {found.rank} on {workers.node_of(found.rank)} {said}")
            return None
        fix = "  fix:   end the script, or print now and then; a longer deadline is --round-timeout-s"
        text = f"rank {found.rank} {said}\n{fix}"
        return Failure(rank=found.rank, t=time.time(), kind="", message=said, text=text)

    def _say_awaited(self, workers: Watched) -> None:
        """Say where workers are that keep others waiting, again if they are elsewhere by then."""
        for rank, waited_s in list(self._awaited.items()):
            before, said_s = self._said.get(rank, ("", 0.0))
            if waited_s < max(_STACK_S, 2 * said_s):
                continue
            where = self._where(workers, rank)
            self._said[rank] = (where, waited_s)
            if where and where != before:
                self._warn(f"rank {rank} on {workers.node_of(rank)} is awaited{where}")

    def _where(self, workers: Watched, rank: int) -> str:
        pid = workers.pid_of(rank)
        found = stacks.ask(self._folder, rank, pid) if pid is not None else ""
        return f"; it is {found}" if found else ""

    def _warn(self, text: str) -> None:
        self._recorder.emit(Noted(t=time.time(), rank=LAUNCHER, text=text, warning=True))
        self._recorder.flush()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
