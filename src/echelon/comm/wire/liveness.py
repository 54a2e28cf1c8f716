"""Which workers are missing when a deadline has passed? Pure.

A worker that waits for its neighbour in a ring cannot know whether the neighbour is late, or waits itself.
So it asks all workers whether they have begun the operation. Those that have not, or do not answer, are
missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from echelon.comm.wire.doing import Doing, awaited

_PATIENCE_S = 1.0


class LivenessCheck:
    """The answers about one operation, asked for at `now`."""

    def __init__(self, asked: set[int], now: float) -> None:
        self._silent = set(asked)
        self._not_begun: set[int] = set()
        self._doings: dict[int, Doing] = {}
        self._until = now + _PATIENCE_S

    def hear(self, rank: int, begun: bool, doing: Doing) -> None:
        """A worker's answer."""
        self._silent.discard(rank)
        self._doings[rank] = doing
        if not begun:
            self._not_begun.add(rank)

    def is_over(self, now: float) -> bool:
        """Whether all have answered, or the time for answers has passed."""
        return not self._silent or now > self._until

    def doing(self, ranks: Sequence[int]) -> str:
        """What these workers do, as far as they have answered."""
        return awaited(ranks, self._doings, self._silent)

    def missing(self) -> list[int]:
        """The missing workers."""
        return sorted(self._silent | self._not_begun)
