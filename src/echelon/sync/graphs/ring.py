"""A ring in the order of ranks. Its spectral gap falls with the square of the number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.graph import Graph, Neighbourhood, from_pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGraph(Graph):
    """The neighbours of each worker are the one before and the one after it."""

    name: ClassVar[str] = "ring"

    def neighbours(self, workers: int, round_: int) -> Neighbourhood:
        """Two neighbours each, if there are three workers or more."""
        return from_pairs(workers, ((rank, (rank + 1) % workers) for rank in range(workers)))
