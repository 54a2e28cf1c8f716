"""Backup workers: a round goes on when all but a few gradients have arrived; those that come later are
lost.

With N workers that take part and b spares, a round's update is the mean, by samples, of the first N - b
gradients (of one at least), and the workers that sent them go on with the new weights. Gradients that were
computed on the weights of a round that is over are dropped, and their workers join the present round. So
every applied gradient was computed on exactly the weights that it is applied to, and nobody waits for the b
slowest. backup(0) is full synchronisation. Chen et al. (2016), "Revisiting Distributed Synchronous SGD",
found 4 of 100 best.
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
    """Goes on when all but `spares` gradients have arrived, and drops the rest."""

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
        """Needs a server, and a worker that is no spare."""
        needs_server(self, cluster)
        if self.spares >= cluster.workers:
            raise ConfigError(
                f"{self.spares} of {cluster.workers} workers are spares, so there is nobody to wait for",
                where="sync backup, spares",
                fix=f"give at most {cluster.workers - 1} spares, or start more workers",
            )

    def rule(self, cluster: ClusterInfo) -> Rule:
        """Rounds, one after the other."""
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
        return self._go_on()

    def leave(self, worker: int, t: float) -> list[Decision]:
        self._active.discard(worker)
        return self._go_on()

    def join(self, worker: int, t: float) -> list[Decision]:
        self._active.add(worker)
        return []

    def state(self) -> dict[str, float]:
        return {"arrived": len(self._arrived), "dropped": self._dropped}

    def _go_on(self) -> list[Decision]:
        if len(self._arrived) < max(1, len(self._active) - self._spares):
            return []
        arrived, self._arrived = self._arrived, []
        self._version += 1
        return [mean(arrived), *(Release(arrival.worker) for arrival in arrived)]
