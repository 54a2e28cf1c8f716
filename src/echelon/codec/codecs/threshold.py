"""Threshold: sends the elements above a fixed magnitude (N. Strom 2015); the others wait.

Their number depends on the gradient, from none to all; waiting elements add up until they are above it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from echelon.codec.positions import Positions
from echelon.codec.sparse import Source, Sparse, reaching
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from echelon.codec.codec import CodecContext


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdCodec(Sparse):
    """Sends the elements whose magnitude is above `value`, however many there are."""

    name: ClassVar[str] = "threshold"
    value: float = 1e-3
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ConfigError(
                f"value cannot be {self.value:g}",
                where="value",
                fix="give 0 or more, such as 1e-3",
            )

    def choose(self, values: Tensor, context: CodecContext) -> Positions:
        """The elements above the value."""
        with np.errstate(over="ignore"):  # a value beyond float32 becomes infinity: nothing is above it
            least = np.float32(self.value)
        if float(least) <= self.value:
            least = np.nextafter(least, np.float32(np.inf))
        return reaching(Source(values.numpy()), least)
