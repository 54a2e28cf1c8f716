"""ternary: every element is -s, 0 or +s by chance, so that its mean is the value; five to a byte.

TernGrad (Wen et al. 2017). The values of a piece are cut off at `clip` deviations; s is the largest
magnitude that is left; an element x becomes sign(x) s with probability |x| / s, else 0. So what is read is
right in the mean, to 2^-17 of s (16 random bits an element), for all that is not cut off.

The deviation is sqrt(mean(x^2)), from zero: what is cut off are magnitudes, and values that are all equal
are not outliers. A total is added up in float32 and written in the same way.
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
    """Writes -s, 0 or +s by chance, right in the mean (TernGrad): 20x smaller."""

    name: ClassVar[str] = "ternary"
    travels: ClassVar[Travels] = "scatter"
    clip: float = 2.5
    feedback: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.clip < math.inf:
            raise ConfigError(
                f"values cannot be cut off at {self.clip:g} deviations",
                where="codec ternary, clip",
                fix="give 2.5, or 0 to cut nothing off",
            )

    @property
    def contracts(self) -> bool:
        """Its errors may be larger than the values: it is right in the mean only."""
        return False

    def write(self, values: Tensor, state: State, turn: CodecContext, rest: Tensor | None = None) -> Tensor:
        """The scale, and digits of base 3."""
        import torch

        scale = np.float32(self._scale(values))
        grid = Grid(_TOP, float(scale))
        payload = torch.empty(_HEAD_BYTES + grid.size_bytes(len(values)), dtype=torch.uint8)
        data = payload.numpy()
        data[:_HEAD_BYTES] = np.frombuffer(scale.tobytes(), np.uint8)
        Coder(grid, len(values), random=turn.stream()).write(values, data[_HEAD_BYTES:], rest)
        return payload

    def read(self, payload: Tensor, out: Tensor, turn: CodecContext, *, add: bool = False) -> None:
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
        """The element itself, if it becomes 0, or what it lacks to the scale, if it does not."""
        magnitudes = values.abs()
        scale = self._scale(values) * (1 + 2.0**-12)  # sums of squares may be rounded otherwise
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
        if here and not 2.0**-40 < here < 2.0**40:  # squares of these are not float32
            scaled = torch.empty(min(BLOCK, len(values))) if not len(scaled) else scaled
            unit = 2.0 ** max(-126, min(126, math.frexp(here)[1]))
            block = torch.mul(block, 1 / unit, out=scaled[: end - begin])
        squares += float(torch.dot(block, block)) * unit * unit
    return most, math.sqrt(squares / max(1, len(values)))
