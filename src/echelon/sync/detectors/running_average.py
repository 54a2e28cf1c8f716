"""Running average: a worker is slow if it takes much longer than its own average.

limit = average * (1 + threshold), over all times kept of the worker. Slow times count in the average too,
so a worker that stays slow becomes normal in the end, and one that was slow from the start is never found.
After Algorithm 3 of Wang and others, "Hierarchical Heterogeneous Cluster Systems for Scalable Distributed
Deep Learning": |cycle time - running average| > threshold. Here the threshold is a fraction of the average,
and a worker that is faster than usual is not detected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.detector import Detector, check_above_zero, check_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAverage(Detector):
    """Slow: longer than the worker's own average by more than the fraction `threshold` of it."""

    name: ClassVar[str] = "running-average"
    threshold: float = 0.5
    after: int = 3

    def __post_init__(self) -> None:
        check_above_zero(self, "threshold")
        check_kept(self, "after")

    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """From the worker's own times only."""
        if len(own) < self.after:
            return math.inf
        return sum(own) / len(own) * (1 + self.threshold)

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Each worker's limit, from its own times only."""
        return [self.limit(own, ()) for own in times]
