"""A random graph that is connected: a ring in random order, and pairs at random on top of it.

Each of degree - 2 times all workers are paired at random. A cycle with random pairs is close to the best
that a graph of so few edges can do (Bollobas and Chung, 1988): its spectral gap hardly falls with the
number of workers. It is drawn from the seed alone, so all workers draw the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.graph import Graph, Neighbourhood, joined, random_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(Graph):
    """Each worker with up to `degree` others, drawn once from the seed; always connected."""

    name: ClassVar[str] = "random"
    degree: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.degree < 2:
            raise ConfigError(
                f"workers with {self.degree} neighbours each cannot be connected",
                where="degree",
                fix="give 2 or more",
            )

    def neighbours(self, workers: int, turn: int) -> Neighbourhood:
        """At least two each, from three workers on; pairs that are drawn twice count once."""
        rng = random.Random(self.seed)
        order = list(range(workers))
        rng.shuffle(order)
        pairs = list(pairwise([*order, order[0]]))
        for _ in range(min(self.degree, workers) - 2):
            pairs += random_pairs(workers, rng)
        return joined(workers, pairs)
