"""Direct: each worker sends every other worker its part, adds what it receives, and returns the result.

Two steps for any number of workers, and the bytes of a ring; but every pair of workers communicates, and
each worker sends and receives P-1 messages at once. With two workers nothing is faster.

With `weights` the parts are unequal: a worker with a slow processor or a thin link sums less, or nothing. A
worker with fraction f of all weights sends and receives n (1 + (P-2) f) elements each; with f = 0 it is n,
in one message to each of those that sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from echelon.comm.schedule.collective import Move, Scattering, Schedule, ScheduleStep, pieces, trim
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectExchange(Scattering):
    """All pairs exchange parts, in two steps; best for two workers, or for very unequal ones.

    `weights` are the parts that workers sum, relative to each other; 0 sums nothing. Default: equal parts.
    """

    name: ClassVar[str] = "direct"
    weights: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        given = self.weights
        if given is not None and not (
            given and all(0 <= one < math.inf for one in given) and 0 < sum(given) < math.inf
        ):
            raise ConfigError(
                f"weights cannot be {list(given)}",
                where="weights",
                fix="give each worker a number of 0 or more, such as weights=[4, 2, 1, 0]",
            )

    def check(self, size: int) -> None:
        """There is a weight for each worker."""
        if self.weights is not None and len(self.weights) != size:
            raise ConfigError(
                f"direct has {len(self.weights)} weights for {size} workers",
                where="collective direct, weights",
                fix="give one for each worker, or leave them out",
            )

    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """All workers send part r to worker r."""
        return to_owners(rank, self._parts(size, length))

    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """Part r."""
        return self._parts(size, length)[rank]

    def _parts(self, size: int, length: int) -> list[tuple[int, int]]:
        self.check(size)
        return pieces(0, length, size) if self.weights is None else _weighted(length, self.weights)


def _weighted(length: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """A range cut in proportion to weights."""
    whole = sum(weights)
    cuts = [round(length * part / whole) for part in accumulate(weights, initial=0.0)]
    cuts[-1] = length
    return list(pairwise(cuts))


def to_owners(rank: int, parts: list[tuple[int, int]]) -> Schedule:
    """All workers send part r to worker r, which adds them up.

    Each worker begins with the next rank, so that not all begin with the same one.
    """
    size = len(parts)
    others = [(rank + shift) % size for shift in range(1, size)]
    step = ScheduleStep(
        sends=tuple(Move(peer, *parts[peer]) for peer in others),
        adds=tuple(Move(peer, *parts[rank]) for peer in others),
    )
    return trim([step])
