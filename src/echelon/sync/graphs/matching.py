"""Randomised gossip: at each turn other pairs, which meet half-way (Boyd and others, 2006).

A turn costs each worker one message. Who meets is drawn from the seed and the turn, so all draw the same.
On average each turn halves the squared distance to the mean, or better, however many workers there are.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.graph import Graph, Neighbourhood, joined, random_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching(Graph):
    """Pairs that are drawn anew at every turn; of an odd number of workers one is left over."""

    name: ClassVar[str] = "matching"
    lasting: ClassVar[bool] = False
    seed: int = 0

    def neighbours(self, workers: int, turn: int) -> Neighbourhood:
        """One each, or none."""
        return joined(workers, random_pairs(workers, random.Random(f"{self.seed}, turn {turn}")))
