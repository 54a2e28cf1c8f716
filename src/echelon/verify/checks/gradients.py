"""Are all gradients finite, and are their norms as usual?

Each worker computes the norm of each of its gradients while they are in flight, and all workers learn all
norms. Corruption of a high bit of an exponent makes a norm huge; that of a low bit of a mantissa changes it
too little to be seen: use replay or replicate for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.errors import ConfigError
from echelon.verify.verification import ActiveVerification, Verification, VerifiedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients(Verification):
    """Finite gradients with usual norms on every worker; else the step is refused on all of them.

    A norm is unusual if it is more than `limit` deviations above the median of the last `window` steps and
    above the other workers'. `action` may also be warn or stop.
    """

    name: ClassVar[str] = "gradients"
    order: ClassVar[int] = 1
    limit: float = 8.0
    window: int = 50
    action: Literal["refuse", "warn", "stop"] = "refuse"

    def __post_init__(self) -> None:
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ConfigError(
                f"limit is {self.limit:g}",
                where="verify gradients, limit",
                fix="give a number above 0, such as 8",
            )
        if self.window < 10:
            raise ConfigError(
                f"a window of {self.window} steps is too short for a median",
                where="verify gradients, window",
                fix="give at least 10",
            )

    def begin(self, run: VerifiedRun) -> ActiveVerification:
        """Look at every round."""
        from echelon.verify.gradient_check import GradientCheck

        return GradientCheck(run, self)
