"""Does a backward pass give the same gradients when it is computed again?

On one machine the same computation gives the same bits, so a difference is a corrupted computation. Every
`every` steps, and in each step that the check of gradients doubts, all workers compute their forward and
backward passes once more. Where results differ, they compute up to `n` times, and use the result that more
than half of the computations gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.verify.verification import ActiveVerification, Verification, VerifiedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Verification):
    """A backward pass computed again gives the same gradients; else the majority of up to n more is used.

    Every `every` steps, and in steps that the check of gradients doubts; every=0: only in those.
    """

    name: ClassVar[str] = "replay"
    order: ClassVar[int] = 2
    repairs: ClassVar[bool] = True
    n: int = 2
    every: int = 100

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(
                f"a step cannot be computed {self.n} times more",
                where="verify replay, n",
                fix="give 2, so that the majority of three results can be used",
            )
        if self.every < 0:
            raise ConfigError(f"every is {self.every}", where="verify replay, every", fix="give 0 or more")

    def check(self, workers: int, others: Sequence[Verification]) -> None:
        """Somebody must say which steps to replay."""
        if not self.every and not any(one.name == "gradients" for one in others):
            raise ConfigError(
                "with every=0 only doubtful steps are replayed, and no check doubts any",
                where="verify replay, every",
                fix='add the check of gradients: --verify "gradients; replay(every=0)"',
            )

    def begin(self, run: VerifiedRun) -> ActiveVerification:
        """Record passes that may have to be replayed."""
        from echelon.verify.replay_check import ReplayCheck

        return ReplayCheck(run, self)
