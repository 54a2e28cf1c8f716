"""Who is to blame when a deadline has passed? Pure.

A worker that waits for its neighbour in a ring cannot know whether that one is late, or waits itself.
So it asks all: who is in the operation too is not to blame; who is not, or says nothing, is.
"""

from __future__ import annotations

_PATIENCE_S = 1.0


class RollCall:
    """The answers to one question, asked at `now`."""

    def __init__(self, asked: set[int], now: float) -> None:
        self._silent = set(asked)
        self._elsewhere: set[int] = set()
        self._until = now + _PATIENCE_S

    def hear(self, rank: int, here: bool) -> None:
        """A worker's answer."""
        self._silent.discard(rank)
        if not here:
            self._elsewhere.add(rank)

    def is_over(self, now: float) -> bool:
        """Whether all have answered, or have had their time."""
        return not self._silent or now > self._until

    def absent(self) -> list[int]:
        """Those who are not in the operation, or said nothing."""
        return sorted(self._silent | self._elsewhere)
