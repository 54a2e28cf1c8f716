"""Top-k: sends the largest elements; the others wait (gradient dropping, Aji and Heafield 2017).

With feedback, and for any k of n elements per step, SGD converges as if nothing were left out, delayed by a
time that grows with n / k (Stich et al. 2018). `codec/sparse.py` finds the k elements quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.codec.codec import chosen
from echelon.codec.positions import Positions
from echelon.codec.sparse import Source, Sparse, check_ratio, check_sample, largest

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.codec.codec import CodecContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TopK(Sparse):
    """Sends the largest elements, a fraction `ratio` of all; the rest is added to the next step's.

    `sample` is the fraction of elements that is sampled to estimate a threshold, 0 for no sampling; it does
    not change which elements are sent.
    """

    name: ClassVar[str] = "top-k"
    ratio: float = 0.01
    feedback: bool = True
    sample: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_sample(self.sample)

    def choose(self, values: Tensor, context: CodecContext) -> Positions:
        """The largest elements."""
        count = chosen(len(values), self.ratio)
        return largest(Source(values.numpy()), count, sample=self.sample, step=context.step)
