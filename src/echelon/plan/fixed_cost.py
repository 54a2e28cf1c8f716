"""What does a step cost apart from its samples? Found from the times of different shares. Pure.

A worker r needs p_r (s + c) seconds for s samples. Its speed p_r is its own; c, counted in samples, is the
same for all. Every time that a worker had another share says something about c: the logarithms of a
worker's times, less log(s + c), are the same but for noise. The c is taken at which they differ least,
measured by their errors, over all workers. Shares that hardly differed say little, and then a c that is
large for the usual share is held to be unlikely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_GRID = 24  # values of c that are tried
_CLOSEST = 0.02  # no mean of logarithms is better known: speeds change a little


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareTime:
    """A worker's mean logarithm of seconds for one share, and its standard error."""

    share: int
    log_s: float
    error: float


def fixed_samples(times: Sequence[Sequence[ShareTime]], usual: float) -> float:
    """The most likely c. `times` are by worker; `usual` is the mean share."""
    told = [worker for worker in times if len({one.share for one in worker}) > 1]
    if not told:
        return 0.0
    tried: list[float] = [0.0, *(usual * 2.0 ** (at / 3 - 5) for at in range(_GRID))]
    return min(tried, key=lambda c: (c / usual) ** 2 + sum(_misfit(worker, c) for worker in told))


def _misfit(worker: Sequence[ShareTime], c: float) -> float:
    """How far one worker's times are from p (s + c), for the best p, in squared errors."""
    weights = [1 / max(one.error, _CLOSEST) ** 2 for one in worker]
    logs = [one.log_s - math.log(one.share + c) for one in worker]
    mean = sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights)
    return sum(w * (log - mean) ** 2 for w, log in zip(weights, logs, strict=True))
