"""Do all workers have the same weights and optimizer states?

Every `every` steps, workers exchange checksums and vote on each tensor. The minority takes over a majority
worker's tensor, so that all have the same bits again. Without a majority (two workers, or two against two)
nobody knows who is right: training stops, or `tie=leader` says that the lowest rank's value is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.errors import ConfigError
from echelon.verify.verification import ActiveVerification, Verification, VerifiedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights(Verification):
    """The same weights and optimizer states on all workers; the minority is repaired from a peer.

    Compared after every `every` steps, at saves and at the end. Without a majority training stops; with
    tie=leader the lowest rank's value is taken.
    """

    name: ClassVar[str] = "weights"
    order: ClassVar[int] = 3
    in_rounds: ClassVar[bool] = False
    comparing: ClassVar[bool] = True
    every: int = 50
    tie: Literal["stop", "leader"] = "stop"

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(
                f"weights cannot be compared every {self.every} steps",
                where="verify weights, every",
                fix="give the number of steps from one comparison to the next, at least 1",
            )

    def begin(self, run: VerifiedRun) -> ActiveVerification:
        """Vote every few steps."""
        from echelon.verify.weight_check import WeightCheck

        return WeightCheck(run, self)
