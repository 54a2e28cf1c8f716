"""The spectral gap of a graph's averaging weights, which bounds how fast gossip converges."""

from __future__ import annotations

import numpy as np

from echelon.sync.graph import Neighbourhood, metropolis_row


def metropolis(neighbours: Neighbourhood) -> list[dict[int, float]]:
    """The Metropolis weights of all workers, row by row."""
    return [metropolis_row(neighbours, worker) for worker in range(len(neighbours))]


def spectral_gap(neighbours: Neighbourhood) -> float:
    """One minus the second-largest absolute eigenvalue of the weights; 1 for a single worker."""
    matrix = np.zeros((len(neighbours), len(neighbours)))
    for i, row in enumerate(metropolis(neighbours)):
        for j, weight in row.items():
            matrix[i, j] = weight
    sizes = np.sort(np.abs(np.linalg.eigvalsh(matrix)))
    return 1 - float(sizes[-2]) if len(sizes) > 1 else 1.0
