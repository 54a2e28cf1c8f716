"""Pauses from an exponential distribution: mostly short, occasionally long."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.cluster.delay import Delay, check


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialDelay(Delay):
    """Pauses (in seconds) from an exponential distribution: mostly short, occasionally long."""

    name: ClassVar[str] = "exponential"
    mean: float

    def __post_init__(self) -> None:
        check(self, "mean", low=0)

    def sample(self, rng: random.Random) -> float:
        """A draw, scaled here because the standard library takes a rate, infinite for a mean of 0."""
        return self.mean * rng.expovariate(1.0)
