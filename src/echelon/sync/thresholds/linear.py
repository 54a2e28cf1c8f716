"""Linear growth: K = 1 + slope * n after n gradients.

linear(1/size) is step(size). With a slope of 0, K stays at its start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.threshold import Curve, check_above


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Curve):
    """K grows by `slope` with every gradient."""

    name: ClassVar[str] = "linear"
    slope: float

    def __post_init__(self) -> None:
        if self.slope < 0:
            raise ConfigError(
                f"with a slope of {self.slope:g}, K would decrease",
                where="threshold linear, slope",
                fix="give a slope of 0 or more",
            )
        check_above(self, "slope", 0, or_equal=True)

    def at(self, gradients: int, workers: int) -> float:
        """1 at first, and `slope` more with each gradient."""
        return 1 + self.slope * gradients
