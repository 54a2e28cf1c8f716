"""From values to positions on a page: round ticks, readable units, and a limited number of points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Point: TypeAlias = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """An axis from `low` to `high`, with ticks, their labels and a title."""

    low: float
    high: float
    ticks: tuple[float, ...]
    labels: tuple[str, ...]
    title: str

    def place(self, value: float, begin: float, end: float) -> float:
        """The position of a value between two pixel positions."""
        return begin + (value - self.low) / (self.high - self.low) * (end - begin)


def value_axis(values: Sequence[float], title: str, *, about: int = 5) -> Axis:
    """An axis from zero (or below) to a round number above all values."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    if high - low <= 0:
        high = low + 1.0
    step = _round_step((high - low) / about)
    low, high = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
    return _axis(low, high, step, title)


def count_axis(low: int, high: int, title: str, *, about: int = 8) -> Axis:
    """An axis of whole numbers, such as steps, from exactly the first to exactly the last."""
    if high <= low:
        high = low + 1
    step = max(1.0, math.ceil(_round_step((high - low) / about)))
    return _axis(low, high, step, title)


def percent_axis(values: Sequence[float], title: str) -> Axis:
    """An axis of fractions shown as percent, up to 100 % and down to a multiple of ten below all values."""
    low = math.floor(10 * min(values, default=0.0) - 1e-9) / 10
    low = min(max(0.0, low), 0.9)
    step = 0.1 if low >= 0.5 else 0.2
    low = math.floor(low / step + 1e-9) * step
    ticks = _ticks(low, 1.0, step)
    return Axis(
        low=low, high=1.0, ticks=ticks, labels=tuple(f"{100 * t:.0f} %" for t in ticks), title=title
    )


def time_axis(low_s: float, high_s: float, title: str, *, about: int = 8) -> Axis:
    """An axis of seconds from exactly the first to exactly the last, in a readable unit."""
    if high_s - low_s < 1e-9:
        high_s = low_s + 1.0
    scale, unit = time_unit(max(abs(low_s), abs(high_s)))
    step = _round_step((high_s - low_s) / scale / about)
    axis = _axis(low_s / scale, high_s / scale, step, f"{title} [{unit}]")
    return Axis(
        low=low_s,
        high=high_s,
        ticks=tuple(tick * scale for tick in axis.ticks),
        labels=axis.labels,
        title=axis.title,
    )


def time_unit(span_s: float) -> tuple[float, str]:
    """The best unit for such a span: its length in seconds, and its name."""
    for scale, unit, up_to in (
        (1e-6, "µs", 1e-3),
        (1e-3, "ms", 1.0),
        (1.0, "s", 300.0),
        (60.0, "min", 3 * 3600.0),
    ):
        if span_s < up_to:
            return scale, unit
    return 3600.0, "h"


def _axis(low: float, high: float, step: float, title: str) -> Axis:
    ticks = _ticks(low, high, step)
    digits = max(0, math.ceil(-math.log10(step) - 1e-9)) if step < 1 else 0
    if step % 1 and step >= 1:  # steps of 2.5
        digits = 1
    return Axis(
        low=low, high=high, ticks=ticks, labels=tuple(f"{t:,.{digits}f}" for t in ticks), title=title
    )


def _ticks(low: float, high: float, step: float) -> tuple[float, ...]:
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return tuple(index * step for index in range(first, last + 1))


def _round_step(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough * (1 - 1e-9))


def thin(points: Sequence[Point], limit: int = 1000) -> list[Point]:
    """At most `limit` of these points, in order: the first, the last, and the extremes of each stretch."""
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    stretches = max(1, (limit - 2) // 2)
    kept = [points[0]]
    for index in range(stretches):
        begin, end = index * len(inner) // stretches, (index + 1) * len(inner) // stretches
        places = range(begin, end)
        low = min(places, key=lambda place: inner[place][1])
        high = max(places, key=lambda place: inner[place][1])
        kept += [inner[place] for place in sorted({low, high})]
    return [*kept, points[-1]]


def smooth(points: Sequence[Point], reach: int) -> list[Point]:
    """Moving average over up to `reach` neighbours on either side, fewer near the ends."""
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    smoothed = []
    for index, (x, _) in enumerate(points):
        side = min(reach, index, len(points) - 1 - index)
        smoothed.append((x, (sums[index + side + 1] - sums[index - side]) / (2 * side + 1)))
    return smoothed
