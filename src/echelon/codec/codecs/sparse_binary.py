"""Sparse-binary: positions and one value for all of them (sparse binary compression, Sattler et al. 2018).

Of the k largest positive and the k largest negative elements, those with the larger mean magnitude are
sent, each as that mean. Feedback keeps the differences, and everything that is left out. The format is that
of any sparse codec, with one float32 in place of a value for each element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.codec import Codec, CodecContext, State, Travels, chosen
from echelon.codec.positions import Positions
from echelon.codec.sparse import (
    ROUNDING,
    Floats,
    Side,
    Source,
    check_ratio,
    check_sample,
    largest,
    leave,
    pack,
    put,
    unpack,
)
from echelon.errors import Corrupt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseBinary(Codec):
    """Sends the positions of the largest elements of one sign, at most a fraction `ratio`, and their mean.

    `sample` is the fraction of elements that is sampled to estimate a threshold, 0 for no sampling; it does
    not change which elements are sent.
    """

    name: ClassVar[str] = "sparse-binary"
    travels: ClassVar[Travels] = "gather"
    ratio: float = 0.01
    feedback: bool = True
    sample: float = 0.01

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        check_sample(self.sample)

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The positions of the largest elements of one sign, and their mean."""
        given: Floats = values.numpy()
        positions, mean = self._side(given, context.step)
        payload = pack(positions, len(values), np.array([mean], "<f4").view(np.uint8))
        leave(values, positions, given[positions] - mean, rest)
        return payload

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """The mean at the chosen positions, zeros elsewhere."""
        positions, data = unpack(payload, len(out))
        if len(data) != 4:
            raise Corrupt(f"{len(data)} bytes for one value", where=f"codec {self.name}")
        put(positions, data.view("<f4")[0], out, add=add)

    def bound(self, values: Tensor) -> Tensor:
        """The distance from the mean for chosen elements, the magnitude for others."""
        bound = values.abs()
        given: Floats = values.numpy()
        positions, mean = self._side(given, 0)
        bound.numpy()[positions] = np.abs(given[positions] - mean) * np.float32(1 + ROUNDING)
        return bound

    def _side(self, values: Floats, step: int) -> tuple[Positions, np.float32]:
        """The largest elements of the sign with the larger mean, the positive ones if they are equal."""
        best = np.empty(0, np.int64), np.float32(0)
        sides: tuple[Side, Side] = (1, -1)
        for side in sides:
            count = chosen(len(values), self.ratio)
            found = largest(Source(values), count, sample=self.sample, step=step, side=side)
            mean = np.float32(values[found].mean(dtype=np.float64)) if len(found) else np.float32(0)
            if abs(mean) > abs(best[1]):
                best = found, mean
        return best
