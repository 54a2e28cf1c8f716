"""Top-k: the largest elements are sent, all others wait (gradient dropping, Aji and Heafield 2017).

With feedback, k elements of n a step and any k, SGD converges as if nothing were left out, later by a time
that grows with n / k (Stich et al. 2018). How the k are found quickly is in `echelon.codec.sparse`.
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
    """Sends the largest elements, a part `ratio` of all; what is left out is added to the next step's.

    `sample` is the part of the elements that is looked at to guess a threshold, 0 to look at all: which
    ones are sent does not depend on it.
    """

    name: ClassVar[str] = "top-k"
    ratio: float = 0.01
    feedback: bool = True
    sample: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_sample(self.sample)

    def choose(self, values: Tensor, turn: CodecContext) -> Positions:
        """The largest ones."""
        count = chosen(len(values), self.ratio)
        return largest(Source(values.numpy()), count, sample=self.sample, step=turn.step)
