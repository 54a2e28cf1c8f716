from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.page.scale import (
    count_axis,
    percent_axis,
    smooth,
    thin,
    time_axis,
    time_unit,
    value_axis,
)

_VALUES = st.lists(st.floats(-1e6, 1e9, allow_subnormal=False), min_size=1, max_size=30)


@settings(max_examples=120)
@given(_VALUES)
def test_a_value_axis_holds_all_values_and_zero_with_a_few_even_ticks(values):
    axis = value_axis(values, "x")
    slack = 1e-8 * (axis.high - axis.low)
    assert axis.low - slack <= min(0.0, *values, 0.0)
    assert axis.high + slack >= max(0.0, *values, 0.0)
    assert 2 <= len(axis.ticks) <= 9
    assert len(set(axis.labels)) == len(axis.labels)
    gaps = [other - one for one, other in pairwise(axis.ticks)]
    assert gaps == pytest.approx([gaps[0]] * len(gaps))


@settings(max_examples=80)
@given(st.integers(0, 10**7), st.integers(0, 10**6))
def test_steps_are_ticked_at_whole_numbers_within_the_range(low, length):
    axis = count_axis(low, low + length, "step")
    assert all(axis.low <= tick <= axis.high and tick == int(tick) for tick in axis.ticks)
    assert 1 <= len(axis.ticks) <= 10
    assert len(set(axis.labels)) == len(axis.labels)


@settings(max_examples=80)
@given(st.floats(0, 1e6), st.floats(1e-5, 1e6))
def test_time_ticks_lie_within_the_range_and_have_different_labels(low, length):
    axis = time_axis(low, low + length, "time")
    slack = 1e-8 * (axis.high - axis.low)
    assert all(axis.low - slack <= tick <= axis.high + slack for tick in axis.ticks)
    assert len(set(axis.labels)) == len(axis.labels)
    assert axis.title.startswith("time [")


@pytest.mark.parametrize(
    ("span_s", "unit"),
    [(1e-5, "µs"), (0.02, "ms"), (12.0, "s"), (299.0, "s"), (1800.0, "min"), (86400.0, "h")],
)
def test_durations_have_a_readable_unit(span_s, unit):
    assert time_unit(span_s)[1] == unit


def test_a_percent_axis_ends_at_100():
    assert percent_axis([0.62, 0.93], "accuracy").labels == ("60 %", "70 %", "80 %", "90 %", "100 %")
    assert percent_axis([0.1], "accuracy").labels[0] == "0 %"
    assert percent_axis([1.0], "accuracy").labels == ("90 %", "100 %")


def test_a_single_value_has_an_axis():
    assert value_axis([0.0], "x").high > 0
    assert count_axis(5, 5, "x").ticks
    assert time_axis(3.0, 3.0, "x").high > 3.0


def test_positions_are_linear_in_the_value():
    axis = value_axis([10.0], "x")
    assert axis.place(0.0, 100, 300) == 100
    assert axis.place(10.0, 100, 300) == 300
    assert axis.place(2.5, 300, 100) == 250


@settings(max_examples=80)
@given(st.lists(st.floats(-1e6, 1e6), max_size=120), st.integers(4, 40))
def test_thinning_keeps_the_ends_and_the_extremes(ys, limit):
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = thin(points, limit)
    assert len(kept) <= max(limit, 4)
    assert set(kept) <= set(points)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert (min(y for _, y in kept), max(y for _, y in kept)) == (min(ys), max(ys))


def test_a_single_spike_survives_thinning():
    ys = [1.0] * 5000
    ys[1234], ys[4321] = 9.0, -9.0
    kept = thin([(float(x), y) for x, y in enumerate(ys)], 100)
    assert {(1234.0, 9.0), (4321.0, -9.0)} <= set(kept)


@settings(max_examples=60)
@given(st.lists(st.floats(-1e3, 1e3), max_size=60), st.integers(0, 9))
def test_smoothing_keeps_positions_and_stays_between_the_extremes(ys, reach):
    points = [(float(x), y) for x, y in enumerate(ys)]
    smoothed = smooth(points, reach)
    assert [x for x, _ in smoothed] == [x for x, _ in points]
    assert all(min(ys) - 1e-6 <= y <= max(ys) + 1e-6 for _, y in smoothed)


def test_smoothing_takes_the_mean_of_neighbours():
    assert smooth([(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)], 1) == [(0, 0.0), (1, 3.0), (2, 3.0), (3, 0.0)]
