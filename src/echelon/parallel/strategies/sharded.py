"""Shards: each worker keeps and updates a slice of every parameter (ZeRO: Rajbhandari et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.parallel.dimension import Dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded(Dimension):
    """Replicas of the model that divide its states among them, each with its share of every batch.

    level    what is divided: 1 optimizer states, 2 also gradients, 3 also parameters
    workers  how many workers divide one set of states; 0: as many as are left
    shares   how large the workers' slices are, such as "2,1"; empty: equal
    offload  a folder in whose files optimizer states are kept, on disk; empty: in memory
    """

    name: ClassVar[str] = "sharded"
    level: int = 1
    workers: int = 0
    shares: str = ""
    offload: str = ""

    def __post_init__(self) -> None:
        if self.level not in (1, 2, 3):
            raise ConfigError(f"level is {self.level}", where="sharded, level", fix="give 1, 2 or 3")
        if self.workers < 0:
            raise ConfigError(
                f"workers is {self.workers}",
                where="sharded, workers",
                fix="give at least 1, or leave it out",
            )
        count = len(self.weights)
        if self.shares and self.workers and count != self.workers:
            raise ConfigError(
                f"{count} shares for {self.workers} workers",
                where="sharded, shares",
                fix=f"give {self.workers} numbers, or leave them out",
            )

    @property
    def extent(self) -> int:
        """The number of workers."""
        return len(self.weights) or self.workers

    @property
    def weights(self) -> tuple[float, ...]:
        """The numbers in `shares`."""
        try:
            found = tuple(float(word) for word in self.shares.split(",")) if self.shares else ()
        except ValueError:
            found = (-1.0,)
        if any(not 0 <= one < float("inf") for one in found) or (found and not sum(found) > 0):
            raise ConfigError(
                f"shares are {self.shares!r}",
                where="sharded, shares",
                fix='give numbers of 0 or more, not all 0: shares="2,1"',
            )
        return found
