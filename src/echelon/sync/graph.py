"""Who is whose neighbour when workers gossip? One file per graph in `graphs/`.

A graph is undirected, and all workers know all of it. How much a worker takes of its neighbours are
the Metropolis weights (Xiao and Boyd, 2004): with d_i neighbours of worker i,

    W_ij = 1 / (1 + max(d_i, d_j))  for neighbours,      W_ii = 1 - sum of the others.

W is symmetric and each row sums to one, so x -> W x keeps the mean of all workers. In a connected graph the
distance to the mean shrinks at each turn at least by the second-largest absolute eigenvalue of W, which is
one minus the spectral gap.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, TypeAlias

from echelon.config.registry import Registry, Strategy

Neighbourhood: TypeAlias = "tuple[tuple[int, ...], ...]"


class Graph(Strategy):
    """Who is whose neighbour. Holds its options only.

    `lasting`: neighbours are the same at every turn, so they have to be connected at every turn.
    """

    __slots__ = ()
    lasting: ClassVar[bool] = True

    @abstractmethod
    def neighbours(self, workers: int, turn: int) -> Neighbourhood:
        """The neighbours of each worker at that turn, from 0; ConfigError if it does not fit them."""


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
GRAPHS: Registry[Graph] = Registry("graph", Graph, "echelon.sync.graphs")  # type: ignore[type-abstract]


def joined(workers: int, pairs: Iterable[tuple[int, int]]) -> Neighbourhood:
    """The neighbours of each worker, in order; pairs of a worker with itself do not count."""
    found: list[set[int]] = [set() for _ in range(workers)]
    for one, other in pairs:
        if one != other:
            found[one].add(other)
            found[other].add(one)
    return tuple(tuple(sorted(others)) for others in found)


def random_pairs(workers: int, rng: random.Random) -> list[tuple[int, int]]:
    """All workers in pairs, drawn at random; of an odd number one is left over."""
    order = list(range(workers))
    rng.shuffle(order)
    return list(zip(order[::2], order[1::2], strict=False))


def reachable(neighbours: Neighbourhood, start: int = 0) -> set[int]:
    """All workers that something known to worker `start` gets to, itself among them."""
    found, waiting = {start}, [start]
    while waiting:
        new = set(neighbours[waiting.pop()]) - found
        found |= new
        waiting += new
    return found


def metropolis_row(neighbours: Neighbourhood, worker: int) -> dict[int, float]:
    """How much a worker takes of each neighbour and of itself; by worker, in order."""
    degree = len(neighbours[worker])
    others = {j: 1 / (1 + max(degree, len(neighbours[j]))) for j in neighbours[worker]}
    return dict(sorted({**others, worker: 1 - sum(others.values())}.items()))


def metropolis(neighbours: Neighbourhood) -> list[dict[int, float]]:
    """The Metropolis weights of all workers, row by row."""
    return [metropolis_row(neighbours, worker) for worker in range(len(neighbours))]


def spectral_gap(weights: Sequence[Mapping[int, float]]) -> float:
    """One minus the second-largest absolute eigenvalue of symmetric weights; 1 for a worker alone."""
    import numpy as np  # it takes a while, and only this needs it

    matrix = np.zeros((len(weights), len(weights)))
    for i, row in enumerate(weights):
        for j, weight in row.items():
            matrix[i, j] = weight
    sizes = np.sort(np.abs(np.linalg.eigvalsh(matrix)))
    return 1 - float(sizes[-2]) if len(sizes) > 1 else 1.0
