"""How does a step's time depend on the share? Found from the times of different shares. Pure.

To begin with, a worker r needs p_r (s + c) seconds for s samples. Its speed p_r is its own; c, what a step
costs apart from its samples, is the same for all, counted in samples. Every time that a worker had another
share says something about c: the logarithms of a worker's times, less log(s + c), are the same but for
noise. The c is taken at which they differ least, measured by their errors, over all workers. Shares that
hardly differed say little, and then a c that is large for the usual share is held to be unlikely.

Then a worker's own times count: the elasticity e = d log t / d log s is s / (s + c) by the above. It can be
more: a processor with a quota, or one that gets hot, is fast for a short time and slow for a long one. The
two are averaged by their errors. Near its present share a worker then needs t (1 - e) + (e t / s) s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_GRID = 24  # values of c that are tried
_CLOSEST = 0.02  # no mean of logarithms is better known: speeds change a little
_FROM_OTHERS = 0.15  # how well the others' c tells a worker's elasticity
_LEAST, _MOST = 0.1, 3.0


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


def elasticity(earlier: Sequence[ShareTime], now: ShareTime, c: float) -> float:
    """How strongly a worker's time follows its share, near its present one."""
    total, whole = 1 / _FROM_OTHERS**2, now.share / (now.share + c) / _FROM_OTHERS**2
    for one in earlier:
        way = math.log(now.share / one.share)
        if way:
            error = math.hypot(max(now.error, _CLOSEST), max(one.error, _CLOSEST)) / way
            total += 1 / error**2
            whole += (now.log_s - one.log_s) / way / error**2
    return min(_MOST, max(_LEAST, whole / total))


def _misfit(worker: Sequence[ShareTime], c: float) -> float:
    """How far one worker's times are from p (s + c), for the best p, in squared errors."""
    weights = [1 / max(one.error, _CLOSEST) ** 2 for one in worker]
    logs = [one.log_s - math.log(one.share + c) for one in worker]
    mean = sum(w * log for w, log in zip(weights, logs, strict=True)) / sum(weights)
    return sum(w * (log - mean) ** 2 for w, log in zip(weights, logs, strict=True))
