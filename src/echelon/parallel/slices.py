"""Which elements of a parameter does each worker keep and update? Consecutive ones, by weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise


def slices(length: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Each worker's first element and the one after its last; a worker may have none."""
    total = sum(weights)
    edges = [0, *(round(length * part / total) for part in accumulate(weights))]
    edges[-1] = length
    return list(pairwise(edges))


def buckets(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Positions that travel together: consecutive ones with at most so many elements, or a single one."""
    found: list[list[int]] = []
    size = 0
    for at, length in enumerate(lengths):
        if not found or size + length > most:
            found.append([])
            size = 0
        found[-1].append(at)
        size += length
    return found
