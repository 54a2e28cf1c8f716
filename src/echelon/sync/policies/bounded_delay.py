"""Bounded delay: no worker gets far ahead of the others, so none reads weights that are too old.

Stale synchronous parallel (Ho et al. 2013). A worker that has made c steps may begin the next one when
every worker has made at least c - bound; until then it waits. Pending gradients are applied together right
before a worker reads. So the weights that a worker reads for its step s (from 0) contain the gradients of
all steps up to s - 1 - bound of every worker.

A gradient's weight is its samples divided by those of one step of all workers: the sum of each worker's
latest samples, where workers that have not pushed yet count as the mean of the others. With bound=0 these
are the weights n_i / N of full synchronisation, with any optimizer. scale=sum applies gradients in full.

A worker that joins starts at the step of the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.errors import ConfigError
from echelon.sync.delay_rate import rate_advice
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Release,
    Rule,
    ServePolicy,
    WeightedPush,
    needs_server,
)
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedDelay(ServePolicy):
    """Like async, but no worker is more than `bound` steps ahead of the slowest (stale synchronous)."""

    name: ClassVar[str] = "bounded-delay"
    bound: int
    scale: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ConfigError(
                f"a worker cannot be at most {self.bound} steps ahead of the slowest",
                where="sync bounded-delay, bound",
                fix="give 0 to wait for all workers in every step, or more to wait less",
            )

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server."""
        needs_server(self, cluster)

    def advice(self, cluster: ClusterInfo) -> str:
        """Which learning rate is safe with this delay."""
        if cluster.lr is None:
            return ""
        summed = cluster.workers if self.scale == "sum" else 1
        return rate_advice(self.bound, cluster.lr, summed_workers=summed)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """Counts each worker's steps."""
        return _BoundedRule(self, cluster.workers)


class _BoundedRule(Rule):
    """`_made` counts each active worker's steps; all pending gradients are of waiting workers."""

    def __init__(self, options: BoundedDelay, workers: int) -> None:
        self._options = options
        self._made = dict.fromkeys(range(workers), 0)
        self._samples: dict[int, float] = {}
        self._held: list[int] = []
        self._pending: list[Arrival] = []

    def arrive(self, arrival: Arrival) -> list[Decision]:
        self._made[arrival.worker] += 1
        self._samples[arrival.worker] = arrival.samples
        self._held.append(arrival.worker)
        self._pending.append(arrival)
        return self._release_free()

    def leave(self, worker: int, t: float) -> list[Decision]:
        self._made.pop(worker, None)
        self._held = [held for held in self._held if held != worker]  # it gave up waiting
        return self._release_free()

    def join(self, worker: int, t: float) -> list[Decision]:
        self._made[worker] = min(self._made.values(), default=0)
        return []

    def state(self) -> dict[str, float]:
        made = self._made.values()
        return {"held": len(self._held), "ahead": max(made, default=0) - min(made, default=0)}

    def _release_free(self) -> list[Decision]:
        furthest = min(self._made.values(), default=0) + self._options.bound
        free = [worker for worker in self._held if self._made[worker] <= furthest]
        if not free:
            return []
        self._held = [worker for worker in self._held if worker not in free]
        return [*self._update(), *(Release(worker) for worker in free)]

    def _update(self) -> list[Decision]:
        pending, self._pending = self._pending, []
        if not pending:  # already applied when another worker read
            return []
        if self._options.scale == "sum":
            return [Apply(tuple(WeightedPush(a.worker, a.step, 1.0) for a in pending))]
        total = self._one_step()
        return [Apply(tuple(WeightedPush(a.worker, a.step, a.samples / total) for a in pending))]

    def _one_step(self) -> float:
        known = [self._samples[worker] for worker in sorted(self._made) if worker in self._samples]
        return sum(known) * len(self._made) / len(known)
