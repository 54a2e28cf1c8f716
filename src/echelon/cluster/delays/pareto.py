"""Pauses with a heavy tail: every pause is at least `scale`, and a few are very much longer.

P(X > x) = (scale / x) ** shape. The smaller the shape, the heavier the tail: the average is
scale * shape / (shape - 1), and infinite for a shape of 1 or less.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.cluster.delay import Delay, check

# Below this a draw can overflow floating-point numbers, which raises an exception.
_LEAST_SHAPE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto(Delay):
    """Pauses (in seconds) from a Pareto distribution: at least scale; a small shape gives a long tail."""

    name: ClassVar[str] = "pareto"
    scale: float
    shape: float

    def __post_init__(self) -> None:
        check(self, "scale", low=0)
        check(self, "shape", low=_LEAST_SHAPE)

    def sample(self, rng: random.Random) -> float:
        """A draw of `scale` or more."""
        return self.scale * rng.paretovariate(self.shape)
