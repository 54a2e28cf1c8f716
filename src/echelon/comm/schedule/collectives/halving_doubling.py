"""Halving-doubling: exchange half of the buffer with the nearest worker, half of that half with a worker
twice as far away, and so on; then back in reverse order.

2 lg P steps and the bytes of a ring, for powers of two (Rabenseifner). The largest exchange is between
neighbours, which often share a machine or a switch. Other numbers of workers are folded (`fold.py`), which
costs hosts the whole buffer once more each way; `binary-blocks` avoids that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.comm.schedule.collective import Move, Scattering, Schedule, ScheduleStep, on, trim
from echelon.comm.schedule.fold import fold, hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class HalvingDoubling(Scattering):
    """Exchanges halves, quarters, ... in 2 log2(workers) steps; few steps and few bytes."""

    name: ClassVar[str] = "halving-doubling"

    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """Fold surplus workers in, then halve."""
        members = hosts(size)
        steps = fold(rank, size, length)
        if rank in members:
            steps += on(members, halve(members.index(rank), len(members), length))
        return trim(steps)

    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """A share of the buffer; an empty range for workers that were folded in."""
        members = hosts(size)
        return share(members.index(rank), len(members), length) if rank in members else (length, length)


def halve(rank: int, size: int, length: int) -> Schedule:
    """Reduce-scatter for a power of two: partners split the range that both still have to sum."""
    steps = []
    bit = 1
    while bit < size:
        partner = rank ^ bit
        give, keep = share(partner, 2 * bit, length), share(rank, 2 * bit, length)
        steps.append(ScheduleStep(sends=(Move(partner, *give),), adds=(Move(partner, *keep),)))
        bit *= 2
    return steps


def share(rank: int, size: int, length: int) -> tuple[int, int]:
    """The range of a worker after the halvings among `size` workers: bit k of its rank selects a half.

    In a larger power of two, the workers of equal rank modulo `size` divide exactly this range.
    """
    low, high = 0, length
    bit = 1
    while bit < size:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if rank & bit else (low, middle)
        bit *= 2
    return low, high
