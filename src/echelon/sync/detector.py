"""The contract of detectors: the longest time that a worker may take and still count as normal.

A detector is given past times in seconds, of computing or of transfers, and returns the longest time that
counts as normal; a worker that takes longer is slow. It has no state: the caller keeps the last `KEPT`
times of each worker.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from echelon.config.registry import Registry, Strategy
from echelon.errors import ConfigError

KEPT = 100


class Detector(Strategy):
    """Tells slow workers from normal ones by past times. Holds only its options."""

    __slots__ = ()

    @abstractmethod
    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """The longest normal time of a worker, by its own past times and the others', oldest first.

        Infinite as long as there are too few times.
        """

    def shortest(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """The shortest normal time; 0 unless a worker that is much faster than usual counts as abnormal."""
        return 0.0

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """The limits of all workers; override it if this can be computed faster than one by one."""
        return [self.limit(own, [*times[:i], *times[i + 1 :]]) for i, own in enumerate(times)]


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
DETECTORS: Registry[Detector] = Registry("detector", Detector, "echelon.sync.detectors")  # type: ignore[type-abstract]


def check_above_zero(detector: Detector, option: str) -> None:
    """Raise ConfigError unless the option is a finite number above zero."""
    value = getattr(detector, option)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{option} is {value:g}, but must be a number above 0",
            where=f"detector {detector.name}, {option}",
            fix="give a number above 0, such as 0.5",
        )


def check_kept(detector: Detector, option: str) -> None:
    """Raise ConfigError unless the option, a number of past times, is 1 to KEPT."""
    value = getattr(detector, option)
    if not 1 <= value <= KEPT:
        raise ConfigError(
            f"{option} is {value}, but must be 1 to {KEPT}, the number of times kept per worker",
            where=f"detector {detector.name}, {option}",
            fix=f"give 1 to {KEPT}",
        )
