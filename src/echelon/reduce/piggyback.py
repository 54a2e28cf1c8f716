"""A few numbers of every worker that travel with a round's gradients, and so cost no message of their own.

One bucket has room for them behind its gradients. Every worker fills its own row and leaves the others at
zero, so the sum over all workers is everybody's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Seats:
    """Whose rows travel: so many workers, of which this one has a rank; `view`: how often they changed.

    A worker that is left out has no seats, and nothing travels.
    """

    rank: int
    workers: int
    view: int = 0


_EXACT = (torch.float32, torch.float64)
_MOST_COUNTED = 1 << 20  # float32 holds it exactly


class Piggyback:
    """The rows of all workers; `tell` gives this worker's for the next round, or None if there is nothing.

    Whether there is something is the same on all workers. `count` is a number that must be the same on all
    workers in every round, such as that of the steps that were taken; `apart` are the first ones, by rank,
    that were not. `seats` are those of now; a bucket keeps those with which it was made.
    """

    def __init__(
        self,
        seats: Callable[[], Seats],
        width: int,
        tell: Callable[[], Sequence[float] | None],
        count: Callable[[], int] = lambda: 0,
    ) -> None:
        self.apart: list[int] | None = None
        self.seats = seats
        self.view = 0  # in which the last rows were told
        self._width = width + 1
        self._count = count
        self._counted = 0
        self._tell = tell
        self._told = False
        self._rows: list[list[float]] | None = None
        self.is_carried = False
        """Whether a bucket carries the numbers."""

    def length(self, seats: Seats) -> int:
        """How many numbers travel."""
        return seats.workers * self._width

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether a bucket of this type keeps the numbers as they are."""
        return dtype in _EXACT

    def fill(self, room: Tensor, seats: Seats) -> None:
        """Write this worker's row."""
        if not seats.workers:
            return
        room.zero_()
        row = self._tell()
        self._told = row is not None
        self._counted = self._count() % _MOST_COUNTED
        if row is not None:
            rows = room.view(seats.workers, self._width)
            rows[seats.rank] = torch.tensor([*row, self._counted], dtype=torch.float64)
        else:
            room[(seats.rank + 1) * self._width - 1] = self._counted

    def landed(self, room: Tensor, seats: Seats) -> None:
        """Read the rows of all workers."""
        if not seats.workers:
            return
        width = self._width
        counts = room[width - 1 :: width].tolist()
        if self.apart is None and counts != [self._counted] * len(counts):
            self.apart = [round(one) for one in counts]
        self.view = seats.view
        self._rows = [row[:-1] for row in room.view(-1, width).tolist()] if self._told else None

    def take(self) -> list[list[float]] | None:
        """The rows of the last round, by rank, once; None if nothing was told."""
        rows, self._rows = self._rows, None
        return rows
