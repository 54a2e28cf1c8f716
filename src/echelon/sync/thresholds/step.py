"""Growth in steps: K = 1 + floor(n / size) after n gradients.

This is the threshold of the smooth-switch paper, whose sizes are multiples of 1 / learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.threshold import Curve, check_above


@dataclass(frozen=True, slots=True, kw_only=True)
class StepThreshold(Curve):
    """K grows by one after every `size` gradients."""

    name: ClassVar[str] = "step"
    size: float

    def __post_init__(self) -> None:
        check_above(self, "size", 0)

    def at(self, gradients: int, workers: int) -> float:
        """1 at first, 2 after `size` gradients, and so on."""
        return 1 + gradients // self.size
