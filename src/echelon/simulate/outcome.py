"""The result of a simulation: a curve and totals for each policy and seed, and averages over them.

The average over a run is the integral of a metric over virtual time (trapezoids), divided by the time, so
early learning counts. msgspec writes it as JSON; values that are not finite become null there.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from echelon.errors import UnknownName
from echelon.simulate.profile import Profile
from echelon.simulate.setting import Setting

Metric = Literal["train_loss", "test_loss", "test_accuracy", "gradients", "updates"]
METRICS: tuple[Metric, ...] = ("train_loss", "test_loss", "test_accuracy", "gradients", "updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The state at one moment; losses and accuracy are None if no gradients are computed."""

    t: float
    gradients: int
    updates: int
    train_loss: float | None = None
    test_loss: float | None = None
    test_accuracy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The counts of a whole run.

    Gradients that were computed but neither applied nor dropped were in flight or waiting at the end.
    `samples` are those of applied gradients. `updates` are those of the server's weights or of the common
    weights; if workers have their own weights, they are the averagings. Staleness is the number of updates
    between reading weights and applying the gradient computed on them. `waiting_share` is the part of the
    workers' time in which they did not compute, transfers included.
    """

    gradients: int
    applied: int
    dropped: int
    updates: int
    samples: int
    staleness_mean: float
    staleness_max: int
    waiting_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One policy with one seed."""

    policy: str
    seed: int
    curve: tuple[Point, ...]
    totals: Totals

    @property
    def final(self) -> Point:
        """The last point."""
        return self.curve[-1]

    def average(self, metric: Metric) -> float:
        """The metric's mean over the run; nan if a value is unknown."""
        points = [(point.t, getattr(point, metric)) for point in self.curve]
        if any(value is None for _, value in points):
            return math.nan
        area = sum(
            (later - t) * (value + then) / 2 for (t, value), (later, then) in itertools.pairwise(points)
        )
        return float(area / (points[-1][0] - points[0][0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """All runs of a simulation, by policy in the given order, then by seed."""

    setting: Setting
    profile: Profile
    runs: tuple[Run, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies, as they were given."""
        return tuple(dict.fromkeys(run.policy for run in self.runs))

    def of(self, policy: str) -> tuple[Run, ...]:
        """The runs of a policy, one per seed."""
        found = tuple(run for run in self.runs if run.policy == policy)
        if not found:
            raise UnknownName("policy", policy, self.policies, where="outcome of a simulation")
        return found

    def average(self, policy: str, metric: Metric) -> float:
        """The mean over the run and the seeds."""
        return statistics.fmean(run.average(_known(metric)) for run in self.of(policy))

    def final(self, policy: str, metric: Metric) -> float:
        """The mean over the seeds at the end."""
        return statistics.fmean(_number(getattr(run.final, _known(metric))) for run in self.of(policy))

    def difference(self, policy: str, other: str, metric: Metric) -> float:
        """The first policy's metric minus the second's, averaged over the run and the seeds."""
        return self.average(policy, metric) - self.average(other, metric)

    def mean_curve(self, policy: str, metric: Metric) -> Sequence[tuple[float, float]]:
        """The metric over time, averaged over the seeds."""
        curves = [run.curve for run in self.of(policy)]
        return [
            (at[0].t, statistics.fmean(_number(getattr(point, _known(metric))) for point in at))
            for at in zip(*curves, strict=True)
        ]


def _known(metric: Metric) -> Metric:
    if metric not in METRICS:
        raise UnknownName("metric", metric, METRICS)
    return metric


def _number(value: float | None) -> float:
    return math.nan if value is None else value
