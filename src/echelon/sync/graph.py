"""The contract of graphs: which workers are neighbours when they gossip.

A graph is undirected, and every worker knows all of it. Neighbours are averaged with Metropolis weights
(Xiao and Boyd, 2004): with d_i neighbours of worker i,

    W_ij = 1 / (1 + max(d_i, d_j))  for neighbours,      W_ii = 1 - sum of the others.

W is symmetric and each row sums to one, so x -> W x keeps the mean of all workers. In a connected graph the
distance to the mean shrinks in each round at least by the second-largest absolute eigenvalue of W, which is
one minus the spectral gap.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, TypeAlias

from echelon.config.registry import Registry, Strategy

Neighbourhood: TypeAlias = "tuple[tuple[int, ...], ...]"


class Graph(Strategy):
    """Which workers are neighbours. Holds only its options.

    If `static`, neighbours are the same in every round, so the graph must be connected.
    """

    __slots__ = ()
    static: ClassVar[bool] = True

    @abstractmethod
    def neighbours(self, workers: int, round_: int) -> Neighbourhood:
        """The neighbours of each worker in a round, from 0; ConfigError if the graph does not fit."""


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
GRAPHS: Registry[Graph] = Registry("graph", Graph, "echelon.sync.graphs")  # type: ignore[type-abstract]


def from_pairs(workers: int, pairs: Iterable[tuple[int, int]]) -> Neighbourhood:
    """The neighbours of each worker, in order; pairs of a worker with itself are ignored."""
    found: list[set[int]] = [set() for _ in range(workers)]
    for one, other in pairs:
        if one != other:
            found[one].add(other)
            found[other].add(one)
    return tuple(tuple(sorted(others)) for others in found)


def random_pairs(workers: int, rng: random.Random) -> list[tuple[int, int]]:
    """All workers in random pairs; of an odd number one is left over."""
    order = list(range(workers))
    rng.shuffle(order)
    return list(zip(order[::2], order[1::2], strict=False))


def reachable(neighbours: Neighbourhood, start: int = 0) -> set[int]:
    """All workers connected with worker `start`, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        new = set(neighbours[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def without(neighbours: Neighbourhood, lost: Iterable[int]) -> Neighbourhood:
    """The graph without some workers, whose neighbours become each other's: it stays connected."""
    found = [set(others) for others in neighbours]
    for one in lost:
        around, found[one] = found[one], set()
        for worker in around:
            found[worker] |= around
            found[worker] -= {one, worker}
    return tuple(tuple(sorted(others)) for others in found)


def metropolis_row(neighbours: Neighbourhood, worker: int) -> dict[int, float]:
    """A worker's Metropolis weights of its neighbours and itself; by worker, in order."""
    degree = len(neighbours[worker])
    others = {j: 1 / (1 + max(degree, len(neighbours[j]))) for j in neighbours[worker]}
    return dict(sorted({**others, worker: 1 - sum(others.values())}.items()))
