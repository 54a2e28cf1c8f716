"""An occasional fixed pause, as from a garbage collector or another job on the same machine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.cluster.delay import Delay, check


@dataclass(frozen=True, slots=True, kw_only=True)
class Sometimes(Delay):
    """A fixed pause with the given probability, otherwise none."""

    name: ClassVar[str] = "sometimes"
    probability: float
    seconds: float

    def __post_init__(self) -> None:
        check(self, "probability", low=0, high=1)
        check(self, "seconds", low=0)

    def sample(self, rng: random.Random) -> float:
        """The pause, or zero. Uses one random number either way."""
        return self.seconds if rng.random() < self.probability else 0.0
