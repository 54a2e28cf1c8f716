"""Exponential growth: K = 2 ** (n / doubling) after n gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.threshold import Curve, check_above

_LARGEST_EXPONENT = 1_000.0  # 2 to the power of 1024 overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialThreshold(Curve):
    """K doubles after every `doubling` gradients."""

    name: ClassVar[str] = "exponential"
    doubling: float

    def __post_init__(self) -> None:
        check_above(self, "doubling", 0)

    def at(self, gradients: int, workers: int) -> float:
        """1 at first, 2 after `doubling` gradients, then 4, and so on."""
        exponent = gradients / self.doubling
        return math.inf if exponent > _LARGEST_EXPONENT else math.pow(2.0, exponent)
