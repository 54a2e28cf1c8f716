"""All with all: one turn gives everybody the mean, at the price of N - 1 messages for each worker."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from echelon.sync.graph import Graph, Neighbourhood, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete(Graph):
    """Every worker with every other."""

    name: ClassVar[str] = "complete"

    def neighbours(self, workers: int, turn: int) -> Neighbourhood:
        """All others."""
        return joined(workers, combinations(range(workers), 2))
