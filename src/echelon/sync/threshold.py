"""How many gradients make an update, as training goes on? One file per threshold in `thresholds/`.

A threshold says K as a number that may be fractional and may exceed the number of workers; who uses it
rounds down and cuts off. It never decreases. Most thresholds are curves: functions of the number of
gradients that have arrived so far. Curves are tried out before training, at every one of the first
gradients and ever more sparsely up to a million, and watched while they are followed.
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
_TRIED_UP_TO = 1_000_000


class Growth(ABC):
    """A threshold during one run."""

    @abstractmethod
    def after(self, arrival: Arrival) -> float:
        """K after one more gradient has arrived."""


class Threshold(Strategy):
    """How K grows. Holds its options only. `listens`: arrivals have to carry `square` and `dot`."""

    __slots__ = ()
    listens: ClassVar[bool] = False

    @abstractmethod
    def growth(self, workers: int) -> Growth:
        """K of one run, from its first gradient on."""

    def check(self, workers: int) -> None:
        """Refuse, with a reason and a fix, what cannot work; before training."""
        return


class Curve(Threshold):
    """A threshold that depends on nothing but the number of gradients."""

    __slots__ = ()

    @abstractmethod
    def at(self, gradients: int, workers: int) -> float:
        """K when so many gradients have arrived."""

    def check(self, workers: int) -> None:
        """Refuse a curve that decreases, and name the first point where that is seen."""
        at, value = 0, _number(self, 0, self.at(0, workers))
        for gradients in _tried():
            try:
                after = _number(self, gradients, self.at(gradients, workers))
            except OverflowError:
                if value < workers:
                    raise
                return  # too large for a number, and no update waits for more than all workers
            if after < value:
                raise _decrease(self, *self._drop_between(at, gradients, workers))
            at, value = gradients, after

    def growth(self, workers: int) -> Growth:
        """Along the curve."""
        return _Along(self, workers)

    def _drop_between(self, low: int, high: int, workers: int) -> tuple[int, float, float]:
        """The gradient at which the curve decreases, with the values before and at it, by bisection."""
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
    """Follows a curve until it has reached the number of workers, from where on K stays."""

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
        f"{option} is {value:g}, it has to be {allowed}",
        where=f"threshold {threshold.name}, {option}",
        fix=f"give {allowed}",
    )


def _tried() -> Iterator[int]:
    at = 0
    while at < _TRIED_UP_TO:
        at = min(_TRIED_UP_TO, at + 1 if at < _EACH_UP_TO else at + at // 100)
        yield at


def _number(curve: Curve, gradients: int, value: float) -> float:
    if math.isnan(value):
        raise ConfigError(
            f"threshold {curve.name} is no number after {gradients} gradients",
            where=f"threshold {curve.name}",
            fix="a threshold is the number of gradients that make an update: 1 or more",
        )
    return value


def _decrease(curve: Curve, gradients: int, before: float, after: float) -> ConfigError:
    return ConfigError(
        f"threshold {curve.name} decreases from {before:g} to {after:g} at gradient {gradients}",
        where=f"threshold {curve.name}",
        fix="take a function that never decreases: gradients in the buffer wait for the larger number",
    )
