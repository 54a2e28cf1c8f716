"""A worker is slow when it takes much longer than it did in its last few steps.

limit = average of the last `width` times * (1 + threshold). It forgets sooner than a running average: a
worker that stays slow is normal again after less than `width` steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from echelon.sync.detector import Detector, above_zero, up_to_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow(Detector):
    """Slow is longer than a worker's last few times on average, by more than a threshold."""

    name: ClassVar[str] = "sliding-window"
    width: int = 10
    threshold: float = 0.5
    after: int = 3

    def __post_init__(self) -> None:
        up_to_kept(self, "width")
        above_zero(self, "threshold")
        up_to_kept(self, "after")

    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """By the worker's own times only."""
        if len(own) < self.after:
            return math.inf
        recent = list(islice(reversed(own), self.width))
        return sum(recent) / len(recent) * (1 + self.threshold)

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Each by its own."""
        return [self.limit(own, ()) for own in times]
