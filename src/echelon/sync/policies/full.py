"""Full synchronisation: every step uses the gradient of the whole batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.policy import ClusterInfo, Family, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(Policy):
    """All workers synchronise in every step: the same result as one process."""

    name: ClassVar[str] = "full"
    family: ClassVar[Family] = "reduce"

    def check(self, cluster: ClusterInfo) -> None:
        """Works with any cluster."""
