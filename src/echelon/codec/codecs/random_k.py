"""Random-k: all workers send the same random elements, so that only their values are sent.

The positions come from the context's shared random numbers: one in each of k strata, which are nearly equal
ranges of the elements. So there are exactly k, they are sorted, and they are cheaper than k out of all n.
An element is chosen with the probability 1 / (length of its stratum), which is about k / n; two elements of
one stratum are never chosen together. (Random elements: Konecny et al. 2016; with feedback: Stich et al.
2018.)

Without feedback, values are multiplied by the lengths of their strata, so that the result is unbiased. With
feedback nothing is multiplied: what is not sent now is sent later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.codec import RESIDUAL, CodecContext, State, Summed, chosen
from echelon.codec.positions import Positions
from echelon.codec.sparse import ROUNDING, Floats, bytes_of, check_ratio, leave, numbers_of, put

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK(Summed):
    """Sends a random fraction `ratio` of elements, the same on all workers, so positions are not sent."""

    name: ClassVar[str] = "random-k"
    ratio: float = 0.01
    feedback: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def positions(self, length: int, context: CodecContext) -> tuple[Positions, Floats]:
        """The elements that all workers send in this step, and the factors of their values."""
        edges = np.arange(chosen(length, self.ratio) + 1) * length // max(1, chosen(length, self.ratio))
        widths = np.diff(edges)
        found = edges[:-1] + (context.stream(shared=True).random(len(widths)) * widths).astype(np.int64)
        return found, np.ones(len(widths), np.float32) if self.feedback else widths.astype(np.float32)

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The values of the chosen elements, and nothing else."""
        return bytes_of(self._sent(values, context, rest))

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The chosen elements, zeros elsewhere."""
        found, _ = self.positions(len(out), context)
        put(found, numbers_of(payload, len(found)).numpy(), out, add=add)

    def bound(self, values: Tensor) -> Tensor:
        """Any element may be left out; without feedback, sent elements are multiplied."""
        if self.feedback or not len(values):
            return values.abs()
        widest = -(-len(values) // chosen(len(values), self.ratio))
        return values.abs() * (max(1, widest - 1) * (1 + ROUNDING))

    def first(self, values: Tensor, state: State, context: CodecContext) -> Tensor:
        """The values of the chosen elements; with feedback, all others are kept."""
        if not self.feedback:
            return self._sent(values, context, None)
        kept = state[RESIDUAL].add_(values)
        return self._sent(kept, context, kept)

    def finish(self, total: Tensor, out: Tensor, state: State, context: CodecContext) -> None:
        """The totals at their positions."""
        put(self.positions(len(out), context)[0], total.numpy(), out, add=False)

    def _sent(self, values: Tensor, context: CodecContext, rest: Tensor | None) -> Tensor:
        import torch

        found, factors = self.positions(len(values), context)
        taken: Floats = values.numpy()[found]
        with np.errstate(over="ignore"):
            sent = taken * factors
            leave(values, found, taken - sent, rest)
        return torch.from_numpy(sent)
