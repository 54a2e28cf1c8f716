"""Do workers that have the same samples compute the same gradients?

n workers have the same share of every batch: ranks s, s + N/n, s + 2 N/n and so on, which are on different
machines where ranks are numbered by machine. N workers train as N/n would. In every step replicas compare
checksums of their gradients; where these differ, the majority's gradients are used, or those that the
user's functions choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.errors import ConfigError
from echelon.verify.verification import ActiveVerification, Verification, VerifiedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicate(Verification):
    """The same samples on n workers give the same gradients; else the majority's are used.

    `consensus` and `validate` name functions as module:name, which decide where checksums differ. Without
    a decision the step is refused, or training stops (tie).
    """

    name: ClassVar[str] = "replicate"
    order: ClassVar[int] = 0
    repairs: ClassVar[bool] = True
    comparing: ClassVar[bool] = True
    n: int = 2
    consensus: str = ""
    validate: str = ""
    tie: Literal["refuse", "stop"] = "refuse"

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ConfigError(
                f"{self.n} replicas cannot be compared",
                where="verify replicate, n",
                fix="give 2 or more; with 3 the one that differs is repaired",
            )

    @property
    def copies(self) -> int:
        """The replicas."""
        return self.n

    def check(self, workers: int, others: Sequence[Verification]) -> None:
        """All shares need the same number of replicas."""
        if workers % self.n:
            raise ConfigError(
                f"{workers} workers cannot form groups of {self.n} replicas",
                where="verify replicate, n",
                fix=f"start a multiple of {self.n} workers",
            )

    def begin(self, run: VerifiedRun) -> ActiveVerification:
        """Compare in every round."""
        from echelon.verify.replica_check import ReplicaCheck

        return ReplicaCheck(run, self)
