"""How long may a worker take and still count as normal? Detectors, one file each in `detectors/`.

A detector is given past times, in seconds, and says the longest time that still counts as normal: beyond
it a worker is held to be slower than it should be. It sees times of one sort only, of computing or of
transfers, and remembers nothing: whoever asks keeps the times, the last `KEPT` of each worker.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

from echelon.config.registry import Registry, Strategy
from echelon.errors import ConfigError

KEPT = 100


class Detector(Strategy):
    """Tells slow from normal by past times. Holds its options only."""

    __slots__ = ()

    @abstractmethod
    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """The longest normal time of a worker, by its own past times and the others', oldest first.

        Infinite while there is too little to tell by.
        """

    def limits(self, times: Sequence[Sequence[float]]) -> list[float]:
        """The limits of all workers at once; for detectors that can do this in less than one by one."""
        return [self.limit(own, [*times[:i], *times[i + 1 :]]) for i, own in enumerate(times)]


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
DETECTORS: Registry[Detector] = Registry("detector", Detector, "echelon.sync.detectors")  # type: ignore[type-abstract]


def above_zero(detector: Detector, option: str) -> None:
    """Raise ConfigError unless the option is a finite number above zero."""
    value = getattr(detector, option)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{option} is {value:g}, it has to be a number above 0",
            where=f"detector {detector.name}, {option}",
            fix="give a number above 0, such as 0.5",
        )


def up_to_kept(detector: Detector, option: str) -> None:
    """Raise ConfigError unless the option counts times that can be there: 1 to KEPT."""
    value = getattr(detector, option)
    if not 1 <= value <= KEPT:
        raise ConfigError(
            f"{option} is {value}, but 1 to {KEPT} times are kept of each worker",
            where=f"detector {detector.name}, {option}",
            fix=f"give 1 to {KEPT}",
        )
