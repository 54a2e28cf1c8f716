"""Butterfly (recursive doubling): in step k each worker exchanges the whole buffer with the worker whose
position differs in bit k.

lg P steps of n elements: the fewest steps, so best for small buffers. If P is not a power of two, the
surplus workers are folded in (`fold.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.comm.schedule.collective import Collective, Move, Schedule, ScheduleStep, mirrored, on, trim
from echelon.comm.schedule.fold import fold, hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Butterfly(Collective):
    """Exchanges whole buffers in log2(workers) steps; best for small buffers."""

    name: ClassVar[str] = "butterfly"

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """Fold surplus workers in, double, unfold."""
        folding, members = fold(rank, size, length), hosts(size)
        doubling: Schedule = []
        if rank in members:
            doubling = on(members, _double(members.index(rank), len(members), length))
        return trim(folding + doubling + mirrored(folding))


def _double(rank: int, size: int, length: int) -> Schedule:
    """For a power of two. Both partners add the same two numbers, so their bits are equal."""
    bits = [1 << k for k in range(size.bit_length() - 1)]
    whole = [Move(rank ^ bit, 0, length) for bit in bits]
    return [ScheduleStep(sends=(move,), adds=(move,)) for move in whole]
