"""Which learning rate is safe with delayed gradients? The condition of bounded delay, and advice from it.

Li et al. (2013, 2014) prove that gradients that are at most tau steps late lead to a stationary point, if
the loss's gradient is Lipschitz continuous with constant L and the learning rate is small enough. With one
constant for all blocks of parameters their condition is

    rate < 1 / (L (1 + tau))

L is seldom known. But without delay the condition is rate < 1 / L, so a rate that is stable with full
synchronisation is safe with a delay after division by 1 + tau. If every worker's gradient is applied in
full (scale=sum), a step of P workers moves P times as far, and the rate is divided by P as well.

The condition is sufficient, not necessary, and is proved for plain gradient descent: larger rates often
work, and momentum makes delays matter more.
"""

from __future__ import annotations

import math

from echelon.errors import ConfigError


def safe_rate(
    delay: int,
    *,
    lipschitz: float | None = None,
    synchronous: float | None = None,
    summed_workers: int = 1,
) -> float:
    """The largest safe rate, from a Lipschitz constant or from a rate that is stable without delay.

    `summed_workers` is how many workers' gradients are applied in full for each step; 1 for their mean.
    """
    if delay < 0 or summed_workers < 1:
        raise ConfigError(
            f"a delay of {delay} steps with {summed_workers} workers does not exist",
            where="learning rate",
            fix="give a delay of 0 or more, and at least one worker",
        )
    if (lipschitz is None) == (synchronous is None):
        raise ConfigError(
            "a safe rate needs a Lipschitz constant, or a rate that is stable without delay",
            where="learning rate",
            fix="give one of the two",
        )
    known = synchronous if lipschitz is None else lipschitz
    if known is None or not 0 < known < math.inf:
        raise ConfigError(f"{known} is not positive", where="learning rate", fix="give a positive number")
    stable = known if lipschitz is None else 1 / known
    return stable / ((1 + delay) * summed_workers)


def rate_advice(delay: int, lr: float, *, summed_workers: int = 1) -> str:
    """A sentence on a learning rate with delayed gradients; empty without delay."""
    part = (1 + delay) * summed_workers
    if part == 1:
        return ""
    steps = "1 step" if delay == 1 else f"{delay} steps"
    summed = f" and {summed_workers} gradients applied in full" if summed_workers > 1 else ""
    return (
        f"with a delay of {steps}{summed}, 1/{part} of a rate that is stable with full synchronisation is "
        f"safe (Li et al.); {lr:g} is safe if {lr * part:g} is stable there"
    )
