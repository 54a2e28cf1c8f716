"""Randomised gossip: new pairs in each round, which average their weights (Boyd and others, 2006).

A round costs each worker one message. Pairs are drawn from the seed and the round's number, so all workers
draw the same. On average a round at least halves the squared distance to the mean, for any number of
workers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.graph import Graph, Neighbourhood, from_pairs, random_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching(Graph):
    """New random pairs in every round; of an odd number of workers one is left over."""

    name: ClassVar[str] = "matching"
    static: ClassVar[bool] = False
    seed: int = 0

    def neighbours(self, workers: int, round_: int) -> Neighbourhood:
        """One neighbour each, or none."""
        return from_pairs(workers, random_pairs(workers, random.Random(f"{self.seed}, turn {round_}")))
