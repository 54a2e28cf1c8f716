"""Threshold: elements above a fixed magnitude are sent (N. Strom 2015), all others wait.

How many that are depends on the gradient, none at all or all of them; what waits adds up until it is above.
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
    """Sends the elements whose magnitude is above `value`, however many that are."""

    name: ClassVar[str] = "threshold"
    value: float = 1e-3
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.value < math.inf:
            raise ConfigError(
                f"a magnitude cannot be above {self.value:g}",
                where="value",
                fix="give 0 or more, such as 1e-3",
            )

    def choose(self, values: Tensor, turn: CodecContext) -> Positions:
        """The elements above."""
        with np.errstate(over="ignore"):  # a value beyond float32 is infinity: nothing is above
            least = np.float32(self.value)
        if float(least) <= self.value:
            least = np.nextafter(least, np.float32(np.inf))
        return reaching(Source(values.numpy()), least)
