"""Full synchronisation: the gradient of every step is that of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.policy import Crew, Family, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(Policy):
    """Every worker, every step: the same result as one process."""

    name: ClassVar[str] = "full"
    family: ClassVar[Family] = "reduce"

    def check(self, crew: Crew) -> None:
        """Works with any."""
