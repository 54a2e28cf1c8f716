"""Which norms of gradients stand out? Pure.

A norm stands out if its logarithm is above the median by more than `limit` deviations, twice over: above
the median of the parameter's norms of all workers in recent steps, and above the median of the other
workers' norms in this step. So neither a change that all workers see (a higher learning rate, training that
diverges) nor a worker that always has larger gradients stands out. A deviation is 1.4826 times the median
absolute deviation, which a few corrupted values do not move, and at least a quarter: gradients that hardly
vary may still double. Zero norms say nothing (a layer that was not used) and are left out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NORMAL = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
_LEAST = 0.25
_STEPS_BEFORE = 10  # before anything stands out
_RENEWED = 5  # the medians are computed again after so many steps


@dataclass(frozen=True, slots=True)
class NormOutlier:
    """A norm that stands out, or is not finite; `usual` is the median of recent steps, 0 if unknown."""

    worker: int
    parameter: int
    norm: float
    usual: float


class NormHistory:
    """The norms of recent steps, by worker and parameter."""

    def __init__(self, *, limit: float, window: int) -> None:
        self._limit = limit
        self._window = window
        self._steps: list[npt.NDArray[np.float64]] = []
        self._median: npt.NDArray[np.float64] | None = None
        self._deviation: npt.NDArray[np.float64] | None = None
        self._since = 0

    def outliers(self, norms: Sequence[Sequence[float]]) -> list[NormOutlier]:
        """Those among this step's norms, by worker and parameter."""
        now = np.asarray(norms, dtype=np.float64)
        found = ~np.isfinite(now)
        if self._median is not None and self._deviation is not None and not found.any():
            logs = _logs(now)
            margin = self._limit * self._deviation
            with np.errstate(invalid="ignore"):  # nan compares false: a zero norm, or one never seen before
                found = logs - self._median > margin
                if found.any() and len(now) > 1:
                    found &= logs - _of_others(logs) > margin
        usual = np.exp(self._median) if self._median is not None else np.zeros(now.shape[1])
        return [
            NormOutlier(int(worker), int(at), float(now[worker, at]), float(np.nan_to_num(usual[at])))
            for worker, at in zip(*np.nonzero(found), strict=True)
        ]

    def add(self, norms: Sequence[Sequence[float]]) -> None:
        """Remember the norms of a step in which nothing stood out."""
        self._steps.append(_logs(np.asarray(norms, dtype=np.float64)))
        del self._steps[: -self._window]
        self._since += 1
        if len(self._steps) >= _STEPS_BEFORE and (self._median is None or self._since >= _RENEWED):
            self._since = 0
            known = np.concatenate(self._steps)
            self._median = _median(known)
            self._deviation = np.maximum(_NORMAL * _median(np.abs(known - self._median)), _LEAST)

    def state(self) -> list[npt.NDArray[np.float64] | int | None]:
        """All that is remembered."""
        return [self._since, self._median, self._deviation, *self._steps]

    def adopt(self, state: Sequence[npt.NDArray[np.float64] | int | None]) -> None:
        """Remember the same as another one."""
        since, self._median, self._deviation, *self._steps = state  # type: ignore[assignment]
        self._since = int(since)  # type: ignore[arg-type]


def _logs(norms: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Their logarithms; nan for zero."""
    logs: npt.NDArray[np.float64] = np.log(np.where(norms > 0, norms, np.nan))
    return logs


def _median(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """By parameter, of the norms that are not zero; nan if all are."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it warns of parameters that were never used
        median: npt.NDArray[np.float64] = np.nanmedian(logs, axis=0)
    return median


def _of_others(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The median of the other workers' norms, for each worker and parameter; -inf where they have none."""
    out = np.full_like(logs, -np.inf)
    for worker in range(len(logs)):
        median = _median(np.delete(logs, worker, axis=0))
        out[worker] = np.where(np.isnan(median), -np.inf, median)
    return out
