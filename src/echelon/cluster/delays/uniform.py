"""Pauses between two bounds, all equally likely."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.cluster.delay import Delay, check
from echelon.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Uniform(Delay):
    """Pauses (in seconds) drawn uniformly between low and high."""

    name: ClassVar[str] = "uniform"
    low: float
    high: float

    def __post_init__(self) -> None:
        check(self, "low", low=0)
        check(self, "high", low=0)
        if self.low > self.high:
            raise ConfigError(
                f"low is {self.low:g}, which is above high, {self.high:g}",
                where=f"delay {self.name}, low",
                fix=f"write {self.name}({self.high:g}, {self.low:g})",
            )

    def sample(self, rng: random.Random) -> float:
        """A number from low to high."""
        return rng.uniform(self.low, self.high)
