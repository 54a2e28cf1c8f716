"""Which batch does a forward pass belong to? The weight of its loss follows from that. Pure.

A worker's loss is weighted by its part of the global batch: n_i / N. If a loop draws several batches before
it trains (zip of two loaders, a list of a loader, prefetching), the batch that was drawn last need not be
the one that is trained. The rules, in this order:

1. A batch whose tensors are among the model's inputs.
2. None is among them, as with generated noise: the batch of the last forward pass that had one, if that was
   after the last draw.
3. Otherwise the oldest batch that was drawn and not trained yet, or the last one that was trained. If
   several could be meant and they are weighted differently, the pass is ambiguous, and its backward pass
   raises.

Weights that are the same on every worker need no decision, and that is nearly always so: they differ for
the last batch of a pass, and between loaders with different batch sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_MOST_PENDING = 4096


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HandedBatch:
    """This worker's share of a batch that a loader has handed out.

    `parts` are the shares of all workers; of a worker that claims its batches alone, only its own.
    """

    loader: int
    share: int
    batch: int
    parts: tuple[int, ...]

    @property
    def weight(self) -> float:
        """The weight of this worker's loss."""
        return self.share / self.batch

    def agrees(self, other: HandedBatch) -> bool:
        """Whether both are weighted alike, on every worker."""
        pairs = zip(self.parts, other.parts, strict=True)
        return all(mine * other.batch == theirs * self.batch for mine, theirs in pairs)

    def __str__(self) -> str:
        return f"{self.share} of {self.batch} samples (loader {self.loader})"


@dataclass(frozen=True, slots=True)
class Belongs:
    """The batch of a forward pass. `others` could be meant as well, and have other weights."""

    batch: HandedBatch
    others: tuple[HandedBatch, ...] = ()


class BatchTracker:
    """Draws and forward passes in; which batch each pass belongs to out."""

    def __init__(self) -> None:
        self._pending: deque[HandedBatch] = deque(maxlen=_MOST_PENDING)  # drawn, not trained yet
        self._current: HandedBatch | None = None
        self._found = False  # the current batch was among a model's inputs since the last draw
        self._used = False  # the current batch was assigned since the last draw

    def drew(self, batch: HandedBatch) -> None:
        """A loader handed out a batch."""
        self._pending.append(batch)
        self._found = self._used = False

    def forget(self, gone: Callable[[HandedBatch], bool]) -> None:
        """Forget drawn batches that will not be trained."""
        kept = [batch for batch in self._pending if not gone(batch)]
        self._pending = deque(kept, maxlen=_MOST_PENDING)

    def entered(self, found: Sequence[HandedBatch]) -> Belongs | None:
        """A forward pass begins, with these batches among its inputs; None if no batch was ever drawn."""
        if found:
            for batch in found:
                if batch in self._pending:
                    self._pending.remove(batch)
            self._current, self._found = found[0], True
            return Belongs(found[0], _other_weights(found[0], found))
        if self._found and self._current is not None:
            return Belongs(self._current)
        could = [*self._pending, *([self._current] if self._used and self._current is not None else [])]
        if not could:
            return None if self._current is None else Belongs(self._current)
        chosen = could[0]
        if self._pending:
            self._pending.popleft()
        self._current, self._used = chosen, True
        return Belongs(chosen, _other_weights(chosen, could))


def _other_weights(chosen: HandedBatch, could: Iterable[HandedBatch]) -> tuple[HandedBatch, ...]:
    """The batches that are weighted differently from the chosen one; one for each weight."""
    others: list[HandedBatch] = []
    for batch in could:
        if not any(batch.agrees(known) for known in (chosen, *others)):
            others.append(batch)
    return tuple(others)
