"""Algorithm 3 as it is written: |cycle time - running average| > threshold, in seconds and both ways.

By Wang and others, "Hierarchical Heterogeneous Cluster Systems for Scalable Distributed Deep Learning". The
average counts all times that are kept, abnormal ones too. A worker that is suddenly faster by more than the
threshold is abnormal as well, where both bounds are used (membership); `flexible` uses the upper one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from echelon.sync.detector import Detector, check_above_zero, check_kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Absolute(Detector):
    """Abnormal: further than `threshold` seconds from the worker's own average, above or below."""

    name: ClassVar[str] = "absolute"
    threshold: float = 0.5
    after: int = 1

    def __post_init__(self) -> None:
        check_above_zero(self, "threshold")
        check_kept(self, "after")

    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """The average and the threshold."""
        return sum(own) / len(own) + self.threshold if len(own) >= self.after else math.inf

    def shortest(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """The average without the threshold."""
        return max(0.0, sum(own) / len(own) - self.threshold) if len(own) >= self.after else 0.0

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """Each worker's limit, from its own times only."""
        return [self.limit(own, ()) for own in times]
