"""Do some workers go on, or end, without the others? Pure: exit codes, phases and signs of life in.

A worker that ends with code 0 and never calls `join` would keep the others waiting there: that is an error
at once. A worker that runs on when others have ended is nobody's mistake as such: the leader may evaluate
and save. It is said, after a few seconds and at growing intervals, and a worker that neither prints nor
records anything for as long as a round may take has failed. One that has closed its session may take as
long as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.observe.readiness import WorkerPhase
from echelon.observe.stall import ranks
from echelon.start.failure import Failure

_FIRST_S = 5.0


def never_joined(
    codes: Mapping[int, int], phases: Mapping[int, WorkerPhase], workers: int
) -> Failure | None:
    """The failure of a worker that has ended with code 0, and for which others wait in `join`."""
    waiting = [
        rank for rank in range(workers) if phases.get(rank) == WorkerPhase.JOINING and rank not in codes
    ]
    gone = [
        rank
        for rank in range(workers)
        if codes.get(rank) == 0 and phases.get(rank, WorkerPhase.RUNNING) < WorkerPhase.JOINED
    ]
    if not waiting or not gone:
        return None
    said = f"ended with exit code 0 before it joined; {ranks(waiting)} waited for it in join()"
    return Failure(rank=gone[0], t=time.time(), kind="", message=said)


@dataclass(frozen=True, slots=True)
class Lingerer:
    """A worker that runs on after others. `over`: it has shown no sign of life for too long."""

    rank: int
    silent_s: float
    over: bool


class Lingering:
    """Follows the workers that run on. `limit_s`: how long one may show no sign of life."""

    def __init__(self, workers: int, limit_s: float) -> None:
        self._workers = workers
        self._limit_s = limit_s
        self._signs: dict[int, tuple[object, float]] = {}
        self._said_s: dict[int, float] = {}

    def look(
        self,
        codes: Mapping[int, int],
        phases: Mapping[int, WorkerPhase],
        signs: Mapping[int, object],
        now: float,
    ) -> Lingerer | None:
        """The worker of which something is to be said now; `signs` change while a worker does something."""
        if not any(codes.get(rank) == 0 for rank in range(self._workers)):
            return None
        for rank in range(self._workers):
            phase = phases.get(rank)
            if rank in codes or phase is None or not WorkerPhase.JOINED <= phase < WorkerPhase.LEFT:
                continue
            sign, since = self._signs.get(rank, (None, now))
            if rank not in self._signs or sign != signs.get(rank):
                self._signs[rank] = (signs.get(rank), now)
                self._said_s[rank] = 0.0
                continue
            silent_s = now - since
            over = silent_s > self._limit_s
            if over or silent_s >= max(_FIRST_S, 2 * self._said_s[rank]):
                self._said_s[rank] = silent_s
                return Lingerer(rank, silent_s, over)
        return None
