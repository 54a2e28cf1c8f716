"""Median and MAD: a worker is slow if it takes much longer than workers usually do.

    centre = the median over workers of the median of each one's last `width` times
    MAD    = the median of |time - centre| over all of these times
    limit  = centre + max(k * 1.4826 * MAD, floor * centre)

1.4826 MAD estimates the standard deviation of normally distributed times. Fewer than half of the workers
cannot shift either median far, however slow they are. So a worker that is slow from the start is found
among normal ones, and jitter of equal workers does not count as slow. If half of the workers are slow, none
is found; of two workers, it cannot tell which one is slow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.detector import Detector, check_above_zero, check_kept

_DEVIATION = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class MedianMad(Detector):
    """Slow: longer than all workers' median by `k` deviations (MAD) and by the fraction `floor` of it."""

    name: ClassVar[str] = "median-mad"
    k: float = 3.0
    floor: float = 0.5
    width: int = 20
    after: int = 3

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k) and self.k >= 0):
            raise ConfigError(
                f"k is {self.k:g}, but must be 0 or more",
                where=f"detector {self.name}, k",
                fix="give 0 or more, such as 3",
            )
        check_above_zero(self, "floor")
        check_kept(self, "width")
        check_kept(self, "after")

    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """The same limit for all workers with enough times."""
        return self.limits([own, *others])[0]

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """One limit, from and for all workers with enough times."""
        known = [list(islice(reversed(own), self.width)) for own in times if len(own) >= self.after]
        if not known:
            return [math.inf] * len(times)
        centre = median([median(recent) for recent in known])
        mad = median([abs(time - centre) for recent in known for time in recent])
        limit = centre + max(self.k * _DEVIATION * mad, self.floor * centre)
        return [limit if len(own) >= self.after else math.inf for own in times]
