"""A ring in the order of ranks. Its spectral gap falls with the square of the number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.graph import Graph, Neighbourhood, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class RingGraph(Graph):
    """Each worker with the one before and the one after it."""

    name: ClassVar[str] = "ring"

    def neighbours(self, workers: int, turn: int) -> Neighbourhood:
        """Two each, from three workers on."""
        return joined(workers, ((rank, (rank + 1) % workers) for rank in range(workers)))
