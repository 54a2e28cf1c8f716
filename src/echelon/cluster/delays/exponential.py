"""Mostly short pauses, now and then a long one; how long the last one took says nothing about the next."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.cluster.delay import Delay, check


@dataclass(frozen=True, slots=True, kw_only=True)
class ExponentialDelay(Delay):
    """Drawn from an exponential distribution: mostly short, now and then long."""

    name: ClassVar[str] = "exponential"
    mean: float

    def __post_init__(self) -> None:
        check(self, "mean", low=0)

    def sample(self, rng: random.Random) -> float:
        """A draw; scaled here because the standard library takes a rate, which a mean of zero has not."""
        return self.mean * rng.expovariate(1.0)

    def average_s(self) -> float:
        """The mean that was asked for."""
        return self.mean
