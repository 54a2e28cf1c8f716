"""A random connected graph: a ring in random order, and random pairs on top of it.

All workers are paired at random degree - 2 times. A cycle with random pairs is close to the best graph with
so few edges (Bollobas and Chung, 1988): its spectral gap hardly falls with the number of workers. It is
drawn from the seed alone, so all workers draw the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.graph import Graph, Neighbourhood, from_pairs, random_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(Graph):
    """Each worker has up to `degree` random neighbours, drawn once from the seed; always connected."""

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

    def neighbours(self, workers: int, round_: int) -> Neighbourhood:
        """At least two neighbours each, if there are three workers or more."""
        rng = random.Random(self.seed)
        order = list(range(workers))
        rng.shuffle(order)
        pairs = list(pairwise([*order, order[0]]))
        for _ in range(min(self.degree, workers) - 2):
            pairs += random_pairs(workers, rng)
        return from_pairs(workers, pairs)
