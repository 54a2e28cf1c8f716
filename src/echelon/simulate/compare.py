"""Compares policies with the first one: figures over the seeds, and sentences about them.

A difference is taken seed by seed, because runs of one seed have the same initial weights, data and delays;
its mean is `SimulationResult.difference`. A spread is the standard deviation over the seeds, 0 for one
seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echelon.simulate.outcome import Metric, Run, SimulationResult

_Key = Callable[["Standing"], float]
_SAME_POINTS = 0.05  # a table with one decimal would not show it


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean and standard deviation of a figure over the seeds."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFigures:
    """One metric at the end, its average over the run, and that average minus the first policy's."""

    end: Spread
    average: Spread
    difference: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One policy's figures; counts are means over the seeds.

    `reached_s` is when the wanted accuracy was first measured, over the `reached` seeds that reached it.
    """

    policy: str
    test_accuracy: MetricFigures
    test_loss: MetricFigures
    train_loss: MetricFigures
    gradients: float
    applied: float
    dropped: float
    updates: float
    staleness_mean: float
    staleness_max: int
    waiting_share: float
    reached: int = 0
    reached_s: Spread | None = None


def compare(outcome: SimulationResult, until_accuracy: float | None = None) -> list[Standing]:
    """The figures of all policies of a simulation, in order."""
    first = outcome.policies[0]
    return [_standing(outcome.of(policy), outcome.of(first), until_accuracy) for policy in outcome.policies]


def _standing(runs: Sequence[Run], first: Sequence[Run], until_accuracy: float | None) -> Standing:
    totals = [run.totals for run in runs]
    seen_s = [t for run in runs if (t := _seen_s(run, until_accuracy)) is not None]
    return Standing(
        policy=runs[0].policy,
        test_accuracy=_figures(runs, first, "test_accuracy"),
        test_loss=_figures(runs, first, "test_loss"),
        train_loss=_figures(runs, first, "train_loss"),
        gradients=statistics.fmean(one.gradients for one in totals),
        applied=statistics.fmean(one.applied for one in totals),
        dropped=statistics.fmean(one.dropped for one in totals),
        updates=statistics.fmean(one.updates for one in totals),
        staleness_mean=statistics.fmean(one.staleness_mean for one in totals),
        staleness_max=max(one.staleness_max for one in totals),
        waiting_share=statistics.fmean(one.waiting_share for one in totals),
        reached=len(seen_s),
        reached_s=_spread(seen_s) if seen_s else None,
    )


def _figures(runs: Sequence[Run], first: Sequence[Run], metric: Metric) -> MetricFigures:
    averages = [run.average(metric) for run in runs]
    return MetricFigures(
        end=_spread([_number(getattr(run.final, metric)) for run in runs]),
        average=_spread(averages),
        difference=_spread(
            [mine - other.average(metric) for mine, other in zip(averages, first, strict=True)]
        ),
    )


def _spread(values: Sequence[float]) -> Spread:
    if not all(math.isfinite(value) for value in values):
        return Spread(mean=math.nan, deviation=math.nan)
    return Spread(
        mean=statistics.fmean(values), deviation=statistics.stdev(values) if len(values) > 1 else 0.0
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _seen_s(run: Run, accuracy: float | None) -> float | None:
    """The time of the first evaluation with at least this accuracy."""
    if accuracy is None:
        return None
    return next(
        (p.t for p in run.curve if p.test_accuracy is not None and p.test_accuracy >= accuracy), None
    )


def in_words(outcome: SimulationResult, standings: Sequence[Standing]) -> list[str]:
    """Sentences about the result: of several policies, the best and the worst compared with the first."""
    first, *others = standings
    if not outcome.setting.gradients:
        return [_pace(outcome, first), *(_pace_beside(first, one) for one in _extremes(others, _applied))]
    if not others:
        return [_alone(outcome, first)]
    return [_beside(first, one) for one in _extremes(others, _ahead)]


def _extremes(standings: Sequence[Standing], by: _Key) -> list[Standing]:
    """The best, and the worst if that is another one."""
    ordered = sorted(standings, key=by, reverse=True)
    return [*ordered[:1], *ordered[1:][-1:]]


def _ahead(one: Standing) -> float:
    ahead = one.test_accuracy.difference.mean
    return ahead if math.isfinite(ahead) else -math.inf


def _applied(one: Standing) -> float:
    return one.applied


def _pace(outcome: SimulationResult, one: Standing) -> str:
    rate = one.applied / outcome.setting.seconds
    return (
        f"{one.policy} applies {rate:,.{0 if rate >= 10 else 2}f} gradients per second; its workers wait "
        f"for {100 * one.waiting_share:.0f} % of the time."
    )


def _pace_beside(first: Standing, one: Standing) -> str:
    if not first.applied:
        return f"{one.policy} applies {one.applied:,.0f} gradients, {first.policy} none."
    ratio = one.applied / first.applied
    return (
        f"{one.policy} applies {ratio:.2f} times as many gradients as {first.policy}; "
        f"its workers wait for {100 * one.waiting_share:.0f} % of the time."
    )


def _alone(outcome: SimulationResult, one: Standing) -> str:
    found = one.test_accuracy
    return (
        f"{one.policy} has a test accuracy of {100 * found.end.mean:.1f} % after "
        f"{outcome.setting.seconds:g} s and {100 * found.average.mean:.1f} % on average over the run. "
        f"It applied {one.applied:,.0f} gradients; {_age(one)}."
    )


def _beside(first: Standing, one: Standing) -> str:
    found = one.test_accuracy.difference
    points, deviation = 100 * found.mean, 100 * found.deviation
    over = "in test accuracy, averaged over the run"
    if not math.isfinite(points):
        return f"{one.policy} and {first.policy} cannot be compared: an accuracy is unknown."
    if abs(points) < _SAME_POINTS:
        judged = f"is as good as {first.policy} {over}"
    else:
        judged = (
            f"is {abs(points):.1f} points {'ahead of' if points > 0 else 'behind'} {first.policy} {over}"
        )
        if abs(points) < deviation:
            judged += f"; this is less than the spread over the seeds (± {deviation:.1f})"
    # The number of applied gradients often explains a difference better than their age.
    times = f", {one.applied / first.applied:.2f} times as many as {first.policy}" if first.applied else ""
    return f"{one.policy} {judged}. It applied {one.applied:,.0f} gradients{times}; {_age(one)}."


def _age(one: Standing) -> str:
    if one.staleness_mean == 0:
        return "they were never stale"
    return f"they were {one.staleness_mean:.1f} updates old on average"
