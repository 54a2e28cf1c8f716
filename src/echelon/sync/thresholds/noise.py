"""K follows the noise of gradients, measured during training.

A worker's gradient is g_i = G + e_i: the true gradient, and noise of mean 0 and covariance S that depends
on its batch. Noise of different batches is independent, so

    E[g_i . g_j] = |G|^2           E[|g_i|^2] = |G|^2 + tr S

Both are estimated by averages over arriving gradients: D of each gradient's product with the previous one
(the weights hardly change in between), and Q of its square. The mean of K gradients has noise tr S / K,
which is as large as the gradient, |G|^2, at

    K = tr S / |G|^2 = Q / D - 1

This is the noise scale of McCandlish et al. (2018), "An Empirical Model of Large-Batch Training", in units
of one worker's batch: with fewer gradients an update is mostly noise, with many more it is hardly better. K
is `ratio` times that, rounded up. It grows during training, because gradients shrink and their noise does
not.

The averages decay exponentially: x <- decay x + (1 - decay) new, both from the second gradient on, so the
start at 0 cancels out in Q / D. K never decreases, so an early chance value would last; therefore K stays 1
for the first `warmup` gradients. If D is not positive, the noise hides the gradient, and K is unlimited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.serve import Arrival
from echelon.sync.threshold import Growth, Threshold, check_above


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise(Threshold):
    """K is `ratio` times the measured noise scale of gradients."""

    name: ClassVar[str] = "noise"
    listens: ClassVar[bool] = True
    ratio: float = 1.0
    decay: float = 0.99
    warmup: int = 100

    def __post_init__(self) -> None:
        check_above(self, "ratio", 0)
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"decay is {self.decay:g}, but must be at least 0 and below 1",
                where="threshold noise, decay",
                fix="give 0.99 to average over about the last 100 gradients",
            )
        check_above(self, "warmup", 1, or_equal=True)

    def growth(self, workers: int) -> Growth:
        """The averages of one run."""
        return _Measured(self)


class _Measured(Growth):
    def __init__(self, options: Noise) -> None:
        self._options = options
        self._gradients = 0
        self._square = 0.0
        self._dot = 0.0
        self._k = 1.0

    def after(self, arrival: Arrival) -> float:
        self._gradients += 1
        # The first gradient has no previous one; an overflow would stay in the averages for ever.
        if self._gradients > 1 and math.isfinite(arrival.square) and math.isfinite(arrival.dot):
            keep = self._options.decay
            self._square = keep * self._square + (1 - keep) * arrival.square
            self._dot = keep * self._dot + (1 - keep) * arrival.dot
        if self._gradients > self._options.warmup and self._square > 0:
            self._k = max(self._k, self._wanted())
        return self._k

    def _wanted(self) -> float:
        if self._dot <= 0:
            return math.inf
        wanted = self._options.ratio * (self._square / self._dot - 1)
        return math.ceil(wanted) if math.isfinite(wanted) else wanted
