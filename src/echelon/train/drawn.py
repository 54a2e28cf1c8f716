"""Whose samples of the batches under way would be missing if a worker were lost? Pure.

Samples count once a round of gradients with them is complete. If a worker is lost before that, its part of
the batches since the last round was in no sum, and is drawn again.

A round may be in flight while further batches are drawn, which are not in it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A batch that all workers have drawn: its positions in the pass, and each slot's number of them."""

    loader: int
    positions: Sequence[int]
    parts: tuple[int, ...]

    def of(self, slot: int) -> Sequence[int]:
        """One worker's positions."""
        begin = sum(self.parts[:slot])
        return self.positions[begin : begin + self.parts[slot]]


class DrawnBatches:
    """The batches since the last round, and the positions that are to be drawn again."""

    def __init__(self) -> None:
        self._batches: list[DrawnBatch] = []
        self._in_flight: deque[list[DrawnBatch]] = deque()  # the batches of each round in flight
        self._again: dict[int, list[int]] = defaultdict(list)

    @property
    def empty(self) -> bool:
        """Whether nothing was drawn since the last round began."""
        return not self._batches

    def drew(self, batch: DrawnBatch) -> None:
        """All workers have drawn a batch, each its part."""
        self._batches.append(batch)

    def sent(self) -> None:
        """A round with all that was drawn is in flight; what is drawn from now on is not in it."""
        self._in_flight.append(self._batches)
        self._batches = []

    @property
    def _of_round(self) -> list[DrawnBatch]:
        """The batches of the next round that is complete."""
        return self._in_flight[0] if self._in_flight else self._batches

    def names_lost(self, members: Collection[int]) -> bool:
        """Whether a part of the next round belongs to somebody who is no member, or it has no batch."""
        return not self._of_round or any(
            share and slot not in members
            for batch in self._of_round
            for slot, share in enumerate(batch.parts)
        )

    def settle(self) -> None:
        """A round is complete, and all that was drawn for it was in its sum."""
        self._of_round.clear()
        if self._in_flight:
            self._in_flight.popleft()

    def reduced(self, members: Collection[int]) -> None:
        """A round is complete: what these members have drawn for it was in its sum, the rest was not."""
        for batch in self._of_round:
            self._return(batch, members)
        self.settle()

    def take(self, loader: int, members: Collection[int]) -> list[int]:
        """The positions of a loader's pass that are to be drawn again; the pass is over otherwise."""
        own = [batch for batch in self._batches if batch.loader == loader]
        self._batches = [batch for batch in self._batches if batch.loader != loader]
        for batch in own:
            self._return(batch, members)
        return sorted(self._again.pop(loader, []))

    def owed(self, loader: int) -> list[int]:
        """The positions of a pass that are to be drawn again at its end, for a checkpoint."""
        return list(self._again.get(loader, []))

    def state(self) -> dict[str, list[int]]:
        """The positions that are to be drawn again, by loader, when no batch is under way."""
        return {str(loader): list(positions) for loader, positions in self._again.items()}

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        """Go on from another worker's."""
        self._batches.clear()
        self._in_flight.clear()
        self._again = defaultdict(list, {int(loader): list(found) for loader, found in state.items()})

    def _return(self, batch: DrawnBatch, members: Collection[int]) -> None:
        for slot in range(len(batch.parts)):
            if slot not in members:
                self._again[batch.loader] += batch.of(slot)
