"""ternary: every element becomes -s, 0 or +s at random, so that its mean is the value; five to a byte.

TernGrad (Wen et al. 2017). The values of a piece are clamped to `clip` deviations; s is the largest
magnitude after that; an element x becomes sign(x) s with probability |x| / s, otherwise 0. So the mean of
what is read is the value, to 2^-17 of s (16 random bits per element), except for clamped values.

The deviation is sqrt(mean(x^2)), from zero: magnitudes are clamped, and equal values are not outliers. A
total is added up in float32 and written in the same way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.bits import BLOCK, blocks
from echelon.codec.codec import Codec, CodecContext, State, Travels
from echelon.codec.grid import Coder, Grid, largest
from echelon.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from torch import Tensor

_HEAD_BYTES = 4  # s, as float32
_TOP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ternary(Codec):
    """Sends -s, 0 or +s at random, with the right mean (TernGrad): 20x smaller."""

    name: ClassVar[str] = "ternary"
    travels: ClassVar[Travels] = "scatter"
    clip: float = 2.5
    feedback: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise ConfigError(
                f"clip cannot be {self.clip:g} deviations",
                where="codec ternary, clip",
                fix="give a number such as 2.5, or 0 for no clipping",
            )

    @property
    def contracts(self) -> bool:
        """Its errors may be larger than the values; only the mean is right."""
        return False

    def write(
        self, values: Tensor, state: State, context: CodecContext, rest: Tensor | None = None
    ) -> Tensor:
        """The scale, and base-3 digits."""
        import torch

        scale = np.float32(self._scale(values))
        grid = Grid(_TOP, float(scale))
        payload = torch.empty(_HEAD_BYTES + grid.size_bytes(len(values)), dtype=torch.uint8)
        data = payload.numpy()
        data[:_HEAD_BYTES] = np.frombuffer(scale.tobytes(), np.uint8)
        Coder(grid, len(values), random=context.stream()).write(values, data[_HEAD_BYTES:], rest)
        return payload

    def read(self, payload: Tensor, out: Tensor, context: CodecContext, *, add: bool = False) -> None:
        """Digits times the scale."""
        data = payload.numpy()
        scale = float(np.frombuffer(data[:_HEAD_BYTES].tobytes(), np.float32)[0]) if len(data) > 3 else -1.0
        grid = Grid(_TOP, scale)
        if not 0 <= scale < math.inf or len(data) != _HEAD_BYTES + grid.size_bytes(len(out)):
            raise Corrupt(
                f"these {len(data)} bytes are not {len(out)} digits and a scale", where="codec ternary"
            )
        Coder(grid, len(out)).read(data[_HEAD_BYTES:], out, add=add)

    def bound(self, values: Tensor) -> Tensor:
        """The element itself if it becomes 0, or its distance to the scale if not."""
        magnitudes = values.abs()
        scale = self._scale(values) * (1 + 2.0**-12)  # sums of squares may round differently
        return magnitudes.maximum(scale - magnitudes)

    def _scale(self, values: Tensor) -> float:
        if not self.clip:
            return largest(values)
        most, deviation = _extent(values)
        return min(most, self.clip * deviation)


def _extent(values: Tensor) -> tuple[float, float]:
    """The largest magnitude and the root of the mean square, for any finite values."""
    import torch

    most = squares = 0.0
    scaled = torch.empty(0)
    for begin, end in blocks(len(values)):
        block, unit = values[begin:end], 1.0
        here = largest(block)
        most = max(most, here)
        if here and not 2.0**-40 < here < 2.0**40:  # squares of these are out of the range of float32
            scaled = torch.empty(min(BLOCK, len(values))) if not len(scaled) else scaled
            unit = 2.0 ** max(-126, min(126, math.frexp(here)[1]))
            block = torch.mul(block, 1 / unit, out=scaled[: end - begin])
        squares += float(torch.dot(block, block)) * unit * unit
    return most, math.sqrt(squares / max(1, len(values)))
