"""Gossip: each worker averages its weights with its neighbours' on a graph; there is no server.

After every `period` steps x_i becomes sum_j W_ij x_j (Lian and others, 2017), with Metropolis weights W
(`echelon.sync.graph`). This keeps the mean of all workers, and workers approach it at least at the rate of
the graph's spectral gap. W does not depend on shares of the batch. The neighbours of a worker that was lost
become each other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.mix import Averaging, MixPolicy, Neighbours
from echelon.sync.graph import GRAPHS, Graph, Neighbourhood, metropolis_row, reachable, without
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Gossip(MixPolicy):
    """Averages weights with neighbours on a graph, after every `period` steps; no server.

    `graph` is one of `echelon list graph`, with its options: `gossip(torus(rows=2))`.
    """

    name: ClassVar[str] = "gossip"
    graph: str = "ring"
    period: int = 1

    def __post_init__(self) -> None:
        _built(self.graph)
        if self.period < 1:
            raise ConfigError(
                f"workers cannot average every {self.period} steps", where="period", fix="give 1 or more"
            )

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a graph that fits the workers and connects them."""
        neighbours = _neighbours(self.graph, cluster.workers, 0)
        if not _built(self.graph).static:
            return
        lost = sorted(set(range(cluster.workers)) - reachable(neighbours))
        if lost:
            raise ConfigError(
                f"worker {lost[0]} cannot be reached from worker 0 on the graph {self.graph}",
                where="--sync gossip, graph",
                fix=f"connect all {cluster.workers} workers: add the pair 0-{lost[0]}, or use ring",
            )

    def averaging(self, step: int, rank: int, cluster: ClusterInfo) -> Averaging | None:
        """The worker's neighbours, if any."""
        if (step + 1) % self.period:
            return None
        static = _built(self.graph).static
        neighbours = _neighbours(self.graph, cluster.workers, 0 if static else step // self.period)
        if cluster.absent:
            neighbours = without(neighbours, cluster.absent)
        return Neighbours(metropolis_row(neighbours, rank)) if neighbours[rank] else None


# Both are cached because every worker calls them in every step.
@lru_cache(maxsize=64)
def _built(text: str) -> Graph:
    return GRAPHS.build(text, where="graph")


@lru_cache(maxsize=64)
def _neighbours(text: str, workers: int, round_: int) -> Neighbourhood:
    return _built(text).neighbours(workers, round_)
