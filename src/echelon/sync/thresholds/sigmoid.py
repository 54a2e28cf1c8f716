"""Sigmoid growth: from one gradient to N, the number of workers, around a given moment.

K = 1 + (N - 1) / (1 + exp((middle - n) / width)) after n gradients, rounded to the nearest integer, so that
K reaches N.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.threshold import Curve, check_above

_FAR = 500.0  # keeps exp from overflowing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sigmoid(Curve):
    """K grows from 1 to all workers in an S-curve around `middle` gradients, mostly within 2 `width`."""

    name: ClassVar[str] = "sigmoid"
    middle: float
    width: float

    def __post_init__(self) -> None:
        check_above(self, "middle", 0, or_equal=True)
        check_above(self, "width", 0)

    def at(self, gradients: int, workers: int) -> float:
        """Half of the growth is reached at `middle`."""
        away = min(_FAR, max(-_FAR, (self.middle - gradients) / self.width))
        return math.floor(1.5 + (workers - 1) / (1 + math.exp(away)))
