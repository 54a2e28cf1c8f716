"""When do the CPU quotas of a lab come into force? When every worker is ready, and it says why.

Quotas are lifted while workers start, so that a slow node does not spend its time importing and loading
data. A worker is ready when it

    trains      it has joined and asks for its first batch, computes its first gradient, begins an
                optimizer's step, or combines figures with other workers after `prepare`
    joined      JOINED_S ago: it may never train by a prepared loader or model
    runs        its script since RUNNING_S without joining: it may never join
    has ended   while others have not

The two bounds do not apply to `echelon train`, whose job is known to train. Pure: the caller looks at the
clock and at the workers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from echelon.observe.readiness import WorkerPhase

JOINED_S = 20.0
RUNNING_S = 30.0


class QuotaTrigger:
    """Decides once for a run. `bounded`: a worker that does not train is awaited only so long."""

    def __init__(self, workers: int, *, bounded: bool = True) -> None:
        self._workers = workers
        self._bounded = bounded
        self._since: dict[tuple[int, WorkerPhase], float] = {}

    def look(self, phases: Mapping[int, WorkerPhase], ended: Collection[int], now: float) -> str | None:
        """Why quotas come into force now; None if they do not yet. `now` is on a clock that only grows."""
        joined: list[int] = []
        running: list[int] = []
        waits = all(rank in ended for rank in range(self._workers))  # there is nothing left to limit
        for rank in range(self._workers):
            phase = phases.get(rank)
            if rank in ended or (phase is not None and phase >= WorkerPhase.TRAINING):
                continue
            if phase is None:
                waits = True
                continue
            phase = WorkerPhase.RUNNING if phase is WorkerPhase.JOINING else phase
            for_s = now - self._since.setdefault((rank, phase), now)
            bound_s = JOINED_S if phase is WorkerPhase.JOINED else RUNNING_S
            waits |= not self._bounded or for_s < bound_s
            (joined if phase is WorkerPhase.JOINED else running).append(rank)
        return None if waits else _reason(joined, running)

    def awaited(self, phases: Mapping[int, WorkerPhase]) -> str:
        """What was awaited, for a run that ends before."""
        late = [rank for rank in range(self._workers) if phases.get(rank, 0) < WorkerPhase.TRAINING]
        return f"{_ranks(late)} had not begun to train" if late else "all had only just begun to train"


def _reason(joined: Sequence[int], running: Sequence[int]) -> str:
    parts = []
    if joined:
        parts.append(f"{_ranks(joined)} joined {JOINED_S:.0f} s ago and did not begin to train")
    if running:
        parts.append(f"the script of {_ranks(running)} has run for {RUNNING_S:.0f} s without joining")
    return "; ".join(parts) or "all workers train"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
