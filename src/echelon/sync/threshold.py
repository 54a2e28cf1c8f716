"""The contract of thresholds: K, the number of gradients per update, as training goes on.

K may be fractional and may exceed the number of workers; the policy rounds it down and limits it. It never
decreases. Most thresholds are curves: functions of the number of gradients so far. Before training, a curve
is checked at each of the first thousand gradients and at ever fewer points up to a million; during training
it is checked at every gradient.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from echelon.config.registry import Registry, Strategy
from echelon.errors import ConfigError
from echelon.sync.families.serve import Arrival

_EACH_UP_TO = 1_000
_CHECKED_UP_TO = 1_000_000


class Growth(ABC):
    """A threshold during one run."""

    @abstractmethod
    def after(self, arrival: Arrival) -> float:
        """K after one more gradient has arrived."""


class Threshold(Strategy):
    """How K grows. Holds only its options. With `listens`, arrivals must carry `square` and `dot`."""

    __slots__ = ()
    listens: ClassVar[bool] = False

    @abstractmethod
    def growth(self, workers: int) -> Growth:
        """The growth of K in one run."""

    def check(self, workers: int) -> None:
        """Raise ConfigError, with a fix, if the threshold cannot work."""
        return


class Curve(Threshold):
    """A threshold that depends only on the number of gradients."""

    __slots__ = ()

    @abstractmethod
    def at(self, gradients: int, workers: int) -> float:
        """K after so many gradients."""

    def check(self, workers: int) -> None:
        """Raise ConfigError if the curve decreases, naming the first point where it does."""
        at, value = 0, _number(self, 0, self.at(0, workers))
        for gradients in _checked_points():
            try:
                after = _number(self, gradients, self.at(gradients, workers))
            except OverflowError:
                if value < workers:
                    raise
                return  # the value is too large for a float, and K is limited to the workers anyway
            if after < value:
                raise _decrease(self, *self._drop_between(at, gradients, workers))
            at, value = gradients, after

    def growth(self, workers: int) -> Growth:
        """Growth along the curve."""
        return _Along(self, workers)

    def _drop_between(self, low: int, high: int, workers: int) -> tuple[int, float, float]:
        """The gradient at which the curve decreases, and the values before and at it; by bisection."""
        before, after = self.at(low, workers), self.at(high, workers)
        while high - low > 1:
            middle = (low + high) // 2
            value = self.at(middle, workers)
            if value < before:
                high, after = middle, value
            else:
                low, before = middle, value
        return high, before, after


class _Along(Growth):
    """Follows a curve until it reaches the number of workers; then K stays."""

    def __init__(self, curve: Curve, workers: int) -> None:
        self._curve = curve
        self._workers = workers
        self._gradients = 0
        self._value = _number(curve, 0, curve.at(0, workers))

    def after(self, arrival: Arrival) -> float:
        self._gradients += 1
        if self._value >= self._workers:
            return self._value
        value = _number(self._curve, self._gradients, self._curve.at(self._gradients, self._workers))
        if value < self._value:
            raise _decrease(self._curve, self._gradients, self._value, value)
        self._value = value
        return value


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
THRESHOLDS: Registry[Threshold] = Registry(
    "threshold",
    Threshold,  # type: ignore[type-abstract]
    "echelon.sync.thresholds",
)


def check_above(threshold: Threshold, option: str, low: float, *, or_equal: bool = False) -> None:
    """Raise ConfigError unless the option is a finite number above `low`."""
    value = getattr(threshold, option)
    if math.isfinite(value) and (value > low or (or_equal and value == low)):
        return
    allowed = f"a number of {low:g} or more" if or_equal else f"a number above {low:g}"
    raise ConfigError(
        f"{option} is {value:g}, but must be {allowed}",
        where=f"threshold {threshold.name}, {option}",
        fix=f"give {allowed}",
    )


def _checked_points() -> Iterator[int]:
    at = 0
    while at < _CHECKED_UP_TO:
        at = min(_CHECKED_UP_TO, at + 1 if at < _EACH_UP_TO else at + at // 100)
        yield at


def _number(curve: Curve, gradients: int, value: float) -> float:
    if math.isnan(value):
        raise ConfigError(
            f"threshold {curve.name} gives no number after {gradients} gradients",
            where=f"threshold {curve.name}",
            fix="make it return the number of gradients per update, 1 or more",
        )
    return value


def _decrease(curve: Curve, gradients: int, before: float, after: float) -> ConfigError:
    return ConfigError(
        f"threshold {curve.name} decreases from {before:g} to {after:g} at gradient {gradients}",
        where=f"threshold {curve.name}",
        fix="use a function that never decreases",
    )
