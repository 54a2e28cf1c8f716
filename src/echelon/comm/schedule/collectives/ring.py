"""Ring: every worker talks only to its two neighbours; no algorithm moves fewer bytes.

2(P-1) steps of n/P elements. In the first P-1 steps each part travels round the ring and is summed on the
way, so that every worker owns one finished part; in the other P-1 steps the finished parts travel round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.comm.schedule.collective import Move, Scattering, Schedule, ScheduleStep, pieces, trim


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCollective(Scattering):
    """Passes parts round a ring of neighbours; the fewest bytes, best for large buffers."""

    name: ClassVar[str] = "ring"

    def reduce_scatter(self, rank: int, size: int, length: int) -> Schedule:
        """Leaves worker r with the whole sum of part r+1."""
        parts = pieces(0, length, size)
        after, before = (rank + 1) % size, (rank - 1) % size
        return trim(
            [
                ScheduleStep(
                    sends=(Move(after, *parts[(rank - step) % size]),),
                    adds=(Move(before, *parts[(rank - step - 1) % size]),),
                )
                for step in range(size - 1)
            ]
        )

    def owned_range(self, rank: int, size: int, length: int) -> tuple[int, int]:
        """Part r+1: the last one that arrives at worker r."""
        return pieces(0, length, size)[(rank + 1) % size]
