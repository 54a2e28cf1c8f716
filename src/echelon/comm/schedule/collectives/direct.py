"""Direct: each worker sends every other worker its part, adds what it receives, and returns the result.

Two steps for any number of workers, and the bytes of a ring; but every pair of workers communicates, and
each worker sends and receives P-1 messages at once. With two workers nothing is faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.comm.schedule.collective import Move, Scattering, Schedule, ScheduleStep, pieces, trim


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectExchange(Scattering):
    """All pairs exchange parts, in two steps; best for two workers."""

    name: ClassVar[str] = "direct"

    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """All workers send part r to worker r."""
        return to_owners(rank, pieces(0, length, size))

    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """Part r."""
        return pieces(0, length, size)[rank]


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
