"""Extends an algorithm for powers of two to any number of workers by folding in the surplus workers.

Each surplus worker is the guest of the neighbour before it: it sends its buffer to that host at the
beginning and gets the result at the end. In between, the hosts and the unpaired workers are a power of two.
This costs two steps and, for a host, the whole buffer each way.
"""

from __future__ import annotations

from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep


def hosts(size: int) -> list[int]:
    """The workers that stay, a power of two. In the first pairs, the odd ranks are guests."""
    guests = _guests(size)
    return [*range(0, 2 * guests, 2), *range(2 * guests, size)]


def fold(rank: int, size: int, length: int) -> Schedule:
    """Guests send their buffer and hosts add it; reversed, guests get the result."""
    if rank >= 2 * _guests(size):
        return []
    if rank % 2:
        return [ScheduleStep(sends=(Move(rank - 1, 0, length),))]
    return [ScheduleStep(adds=(Move(rank + 1, 0, length),))]


def _guests(size: int) -> int:
    return size - (1 << (size.bit_length() - 1))
