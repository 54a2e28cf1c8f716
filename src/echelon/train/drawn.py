"""Whose samples of the batches under way would be missing if a worker were lost? Pure.

Samples count once a round of gradients with them is complete. If a worker is lost before that, its part of
the batches since the last round was in no sum, and is drawn again.

A round may be in flight while further batches are drawn, which are not in it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
        self._in_flight: deque[list[DrawnBatch]] = deque()  # the batches of each round in flight
        self._kept: list[tuple[DrawnBatch, set[int]]] = []  # and whose parts only these workers have
        self._refused: frozenset[int] = frozenset()  # of the round that is complete
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

    def refuse(self, slots: Collection[int]) -> None:
        """The parts of these were in no sum: their gradients were not finite. They are drawn again once."""
        self._refused = frozenset(slots)
        for batch in self._of_round if slots else ():
            for slot in slots:
                if slot < len(batch.parts) and not batch.again:
                    self._again[batch.loader] += batch.of(slot)

    def reduced(self, members: Collection[int], alone: Collection[int] = ()) -> None:
        """A round is complete: what these members have drawn for it was in its sum, the rest was not.

        alone  members whose part is in their own weights only: it is missing if they are lost later
        """
        self._return_kept({*members, *alone}, alone)
        for batch in self._of_round:
            self._return(batch, {*members, *alone})
            if alone:
                self._kept.append((batch, set(alone)))
        self._of_round.clear()
        if self._in_flight:
            self._in_flight.popleft()
        self._refused = frozenset()

    def _return_kept(self, members: Collection[int], alone: Collection[int]) -> None:
        for batch, holders in self._kept:
            for slot in holders - set(members):
                self._again[batch.loader] += batch.of(slot)
            holders &= set(alone)
        self._kept = [(batch, holders) for batch, holders in self._kept if holders]

    def take(self, loader: int, members: Collection[int]) -> list[int]:
        """The positions of a loader's pass that are to be drawn again; the pass is over otherwise."""
        own = [batch for batch in self._batches if batch.loader == loader]
        self._batches = [batch for batch in self._batches if batch.loader != loader]
        for batch in own:
            self._return(batch, members)
        self._return_kept(members, members)
        self._kept = [(batch, holders) for batch, holders in self._kept if batch.loader != loader]
        return sorted(self._again.pop(loader, []))

    def owed(self, loader: int) -> list[int]:
        """The positions of a pass that are to be drawn again at its end, for a checkpoint."""
        return list(self._again.get(loader, []))

    def state(self) -> dict[str, Any]:
        """The positions that are to be drawn again, by loader, when no batch is under way."""
        kept = [
            [one.loader, list(one.positions), list(one.parts), one.again, sorted(slots)]
            for one, slots in self._kept
        ]
        return {"again": {loader: list(found) for loader, found in self._again.items()}, "kept": kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from another worker's."""
        self._batches.clear()
        self._in_flight.clear()
        self._again = defaultdict(list, {loader: list(found) for loader, found in state["again"].items()})
        self._kept = [
            (DrawnBatch(loader, positions, tuple(parts), again), set(slots))
            for loader, positions, parts, again, slots in state["kept"]
        ]

    def _return(self, batch: DrawnBatch, members: Collection[int]) -> None:
        for slot in range(len(batch.parts)):
            if slot not in members and slot not in self._refused:
                self._again[batch.loader] += batch.of(slot)
