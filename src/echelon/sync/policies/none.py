"""No synchronisation: every worker trains by itself, on its own part of the data.

The baseline against which the other policies are measured. After the last step the weights of all workers
are averaged once, for a run has one result; before that, each is evaluated by its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.sync.families.mix import Meeting, MixPolicy
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSync(MixPolicy):
    """Never: every worker trains by itself, and weights are averaged once, at the end."""

    name: ClassVar[str] = "none"
    shown: ClassVar[Literal["mean", "own", "center"]] = "own"

    def check(self, cluster: ClusterInfo) -> None:
        """Works with any."""

    def meeting(self, step: int, rank: int, cluster: ClusterInfo) -> Meeting | None:
        """Nobody."""
        return None
