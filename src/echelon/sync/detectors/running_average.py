"""A worker is slow when it takes much longer than it does on average.

limit = average * (1 + threshold), over all of the worker's times that are kept. Slow times count in the
average too, so a worker that stays slow becomes normal in the end; one that was slow from the start always
is. After Algorithm 3 of Wang and others, "Hierarchical Heterogeneous Cluster Systems for Scalable
Distributed Deep Learning": |cycle time - running average| > threshold. Here the threshold is a part of the
average, and a worker that is faster than usual is no reason for anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.detector import Detector, above_zero, up_to_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAverage(Detector):
    """Slow is longer than a worker's own average by more than a threshold, as a part of the average."""

    name: ClassVar[str] = "running-average"
    threshold: float = 0.5
    after: int = 3

    def __post_init__(self) -> None:
        above_zero(self, "threshold")
        up_to_kept(self, "after")

    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """By the worker's own times only."""
        if len(own) < self.after:
            return math.inf
        return sum(own) / len(own) * (1 + self.threshold)

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Each by its own."""
        return [self.limit(own, ()) for own in times]
