"""Hogwild: all workers of one machine update the same weights in shared memory, without locks.

Updates may overwrite parts of each other. If each update changes few weights, that is rare, and training
converges as with locks (Niu, Recht, Re and Wright, 2011); dense models get noisier gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.policy import ClusterInfo, Family, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Hogwild(Policy):
    """All workers of one machine update the same memory, without locks."""

    name: ClassVar[str] = "hogwild"
    family: ClassVar[Family] = "share"

    def check(self, cluster: ClusterInfo) -> None:
        """Needs all workers on one machine."""
        if cluster.machines > 1:
            raise ConfigError(
                f"hogwild shares the memory of one machine, but the workers are on {cluster.machines}",
                where="--sync",
                fix="use one machine, or async with a parameter server: --sync async --servers 1",
            )
