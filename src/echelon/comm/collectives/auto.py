"""Auto: the collective that the cost model finds cheapest for this group and this length.

Two workers exchange directly; small buffers want few steps, large ones few bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.comm.collective import COLLECTIVES, Collective, Schedule

_SMALL = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto(Collective):
    """Picks direct, butterfly or ring by the number of workers and the length."""

    name: ClassVar[str] = "auto"

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """The chosen collective's schedule."""
        return COLLECTIVES.build(self.choose(size, length)).schedule(rank, size, length)

    def choose(self, size: int, length: int) -> str:
        """The name of the collective that would be used."""
        if size <= 2:
            return "direct"
        return "butterfly" if length <= _SMALL else "ring"
