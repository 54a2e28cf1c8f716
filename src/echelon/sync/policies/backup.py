"""Backup workers: a round ends when all but a few gradients have arrived; later ones are dropped.

With N workers and b spares, a round's update is the mean, weighted by samples, of the first N - b gradients
(at least one), and the workers that sent them continue with the new weights. Gradients computed on the
weights of an earlier round are dropped, and their workers join the current round. So every gradient is
applied to exactly the weights it was computed on, and nobody waits for the b slowest. backup(0) is full
synchronisation. Chen et al. (2016), "Revisiting Distributed Synchronous SGD", found 4 of 100 best.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.serve import (
    Arrival,
    Decision,
    Drop,
    Release,
    Rule,
    ServePolicy,
    mean,
    needs_server,
)
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup(ServePolicy):
    """Ends a round when all but `spares` gradients have arrived, and drops the rest."""

    name: ClassVar[str] = "backup"
    spares: int

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise ConfigError(
                f"there cannot be {self.spares} spares",
                where="sync backup, spares",
                fix="give 0 to wait for all workers, or how many not to wait for",
            )

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server, and more workers than spares."""
        needs_server(self, cluster)
        if self.spares >= cluster.workers:
            raise ConfigError(
                f"{self.spares} of {cluster.workers} workers are spares, so there is nobody to wait for",
                where="sync backup, spares",
                fix=f"give at most {cluster.workers - 1} spares, or start more workers",
            )

    def rule(self, cluster: ClusterInfo) -> Rule:
        """The rounds of one run."""
        return _BackupRounds(self.spares, cluster.workers)


class _BackupRounds(Rule):
    def __init__(self, spares: int, workers: int) -> None:
        self._spares = spares
        self._active = set(range(workers))
        self._version = 0
        self._arrived: list[Arrival] = []
        self._dropped = 0

    def arrive(self, arrival: Arrival) -> list[Decision]:
        self._version = max(self._version, arrival.read)  # a server that resumed does not start at 0
        if arrival.read < self._version:
            self._dropped += 1
            reason = f"its round is over: computed on version {arrival.read}, now {self._version}"
            return [Drop(arrival.worker, arrival.step, reason), Release(arrival.worker)]
        self._arrived.append(arrival)
        return self._end_if_complete()

    def leave(self, worker: int, t: float) -> list[Decision]:
        self._active.discard(worker)
        return self._end_if_complete()

    def join(self, worker: int, t: float) -> list[Decision]:
        self._active.add(worker)
        return []

    def state(self) -> dict[str, float]:
        return {"arrived": len(self._arrived), "dropped": self._dropped}

    def _end_if_complete(self) -> list[Decision]:
        if len(self._arrived) < max(1, len(self._active) - self._spares):
            return []
        arrived, self._arrived = self._arrived, []
        self._version += 1
        return [mean(arrived), *(Release(arrival.worker) for arrival in arrived)]
