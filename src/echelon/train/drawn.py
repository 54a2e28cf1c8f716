"""Whose samples of the batches under way would be missing if a worker were lost? Pure.

Samples count once a round of gradients with them is complete. If a worker is lost before that, its part of
the batches since the last round was in no sum, and is drawn again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A batch that all workers have drawn: its positions in the pass, and each slot's number of them.

    `again`: its samples were drawn before, and were in no sum.
    """

    loader: int
    positions: Sequence[int]
    parts: tuple[int, ...]
    again: bool = False

    def of(self, slot: int) -> Sequence[int]:
        """One worker's positions."""
        begin = sum(self.parts[:slot])
        return self.positions[begin : begin + self.parts[slot]]


class DrawnBatches:
    """The batches since the last round, and the positions that are to be drawn again."""

    def __init__(self) -> None:
        self._batches: list[DrawnBatch] = []
        self._refused: frozenset[int] = frozenset()  # of the round that is complete
        self._again: dict[int, list[int]] = defaultdict(list)

    @property
    def empty(self) -> bool:
        """Whether nothing was drawn since the last round."""
        return not self._batches

    def drew(self, batch: DrawnBatch) -> None:
        """All workers have drawn a batch, each its part."""
        self._batches.append(batch)

    def names_lost(self, members: Collection[int]) -> bool:
        """Whether a part belongs to somebody who is no member."""
        return any(
            share and slot not in members
            for batch in self._batches
            for slot, share in enumerate(batch.parts)
        )

    def refuse(self, slots: Collection[int]) -> None:
        """The parts of these were in no sum: their gradients were not finite. They are drawn again once."""
        self._refused = frozenset(slots)
        for batch in self._batches if slots else ():
            for slot in slots:
                if slot < len(batch.parts) and not batch.again:
                    self._again[batch.loader] += batch.of(slot)

    def settle(self) -> None:
        """All that was drawn was in a sum."""
        self._batches.clear()
        self._refused = frozenset()

    def reduced(self, members: Collection[int]) -> None:
        """What these members have drawn was in a sum, the others' parts were not."""
        for batch in self._batches:
            self._return(batch, members)
        self._batches.clear()
        self._refused = frozenset()

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
        self._again = defaultdict(list, {int(loader): list(found) for loader, found in state.items()})

    def _return(self, batch: DrawnBatch, members: Collection[int]) -> None:
        for slot in range(len(batch.parts)):
            if slot not in members and slot not in self._refused:
                self._again[batch.loader] += batch.of(slot)
