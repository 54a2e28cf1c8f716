"""Sliding window: a worker is slow if it takes much longer than in its last few steps.

limit = average of the last `width` times * (1 + threshold). It adapts faster than a running average: a
worker that stays slow is normal again after fewer than `width` steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from echelon.sync.detector import Detector, check_above_zero, check_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Detector):
    """Slow: longer than the average of the worker's last `width` times by more than `threshold` of it."""

    name: ClassVar[str] = "sliding-window"
    width: int = 10
    threshold: float = 0.5
    after: int = 3

    def __post_init__(self) -> None:
        check_kept(self, "width")
        check_above_zero(self, "threshold")
        check_kept(self, "after")

    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """From the worker's own times only."""
        if len(own) < self.after:
            return math.inf
        recent = list(islice(reversed(own), self.width))
        return sum(recent) / len(recent) * (1 + self.threshold)

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Each worker's limit, from its own times only."""
        return [self.limit(own, ()) for own in times]
