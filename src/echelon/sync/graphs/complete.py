"""Complete graph: one round gives every worker the mean, with N - 1 messages per worker."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from echelon.sync.graph import Graph, Neighbourhood, from_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete(Graph):
    """Every worker is a neighbour of every other."""

    name: ClassVar[str] = "complete"

    def neighbours(self, workers: int, round_: int) -> Neighbourhood:
        """All other workers."""
        return from_pairs(workers, combinations(range(workers), 2))
