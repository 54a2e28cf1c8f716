"""The contract of delays: pauses injected into a worker, drawn from a distribution. See `delays/`.

A delay is written as `normal(0, 0.25)` and gives seconds, one draw per step. Draws are never negative: if
the distribution reaches below zero, negative draws count as zero. All randomness comes from the caller's
generator, so the same seed gives the same pauses.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod

from echelon.config.registry import Registry, Strategy
from echelon.errors import ConfigError


class Delay(Strategy):
    """A distribution of pauses. It holds only its options; the caller owns the random generator."""

    __slots__ = ()

    @abstractmethod
    def sample(self, rng: random.Random) -> float:
        """The next pause in seconds, never negative."""


# mypy does not accept an abstract class as a value; the registry never instantiates it.
DELAYS: Registry[Delay] = Registry("delay", Delay, "echelon.cluster.delays")  # type: ignore[type-abstract]


def check(delay: Delay, option: str, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise ConfigError unless the option is a finite number within [low, high]."""
    value = getattr(delay, option)
    if math.isfinite(value) and low <= value <= high:
        return
    if high < math.inf:
        allowed = f"a number from {low:g} to {high:g}"
    else:
        allowed = f"a number of {low:g} or more" if low > -math.inf else "a finite number"
    raise ConfigError(
        f"{option} is {value:g}, it has to be {allowed}",
        where=f"delay {delay.name}, {option}",
        fix=f"give {allowed}",
    )
