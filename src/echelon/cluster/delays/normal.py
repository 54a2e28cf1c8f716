"""Pauses from a normal distribution; negative draws count as zero.

The average is therefore not `mean` but that of max(0, X):
mean * Phi(mean / deviation) + deviation * phi(mean / deviation). normal(0, 0.25) pauses in half of all
draws, and 0.1 s on average.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.cluster.delay import Delay, check


@dataclass(frozen=True, slots=True, kw_only=True)
class Normal(Delay):
    """Pauses (in seconds) from a normal distribution; negative draws count as zero."""

    name: ClassVar[str] = "normal"
    mean: float
    deviation: float

    def __post_init__(self) -> None:
        check(self, "mean")
        check(self, "deviation", low=0)

    def sample(self, rng: random.Random) -> float:
        """A draw, or zero if it is negative."""
        return max(0.0, rng.normalvariate(self.mean, self.deviation))
