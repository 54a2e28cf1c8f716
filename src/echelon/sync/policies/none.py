"""No synchronisation: every worker trains by itself, on its own part of the data.

This is the baseline for other policies. After the last step the weights of all workers are averaged once,
because a run has one result; before that, each worker is evaluated with its own weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.sync.families.mix import Averaging, MixPolicy
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSync(MixPolicy):
    """No synchronisation: every worker trains by itself; weights are averaged once, at the end."""

    name: ClassVar[str] = "none"
    shown: ClassVar[Literal["mean", "own", "center"]] = "own"

    def check(self, cluster: ClusterInfo) -> None:
        """Works with any cluster."""

    def averaging(self, step: int, rank: int, cluster: ClusterInfo) -> Averaging | None:
        """None: workers never average."""
        return None
