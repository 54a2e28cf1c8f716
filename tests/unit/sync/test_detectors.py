"""What each detector counts as slow, and the checks of their options."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest

from echelon.errors import ConfigError, UnknownName
from echelon.sync.detector import DETECTORS, KEPT

NAMES = [name for name in DETECTORS.names() if name != "function"]  # it needs a target


def _limit(text: str, *times: list[float]) -> float:
    """The limit of the first worker."""
    return DETECTORS.build(text).limit(times[0], times[1:])


def test_the_detectors_are_registered():
    assert {"running-average", "sliding-window", "median-mad"} <= set(NAMES)


def test_a_running_average_is_over_all_times_and_the_threshold_is_relative_to_it():
    assert _limit("running-average(0.5)", [1.0, 2.0, 3.0], [100.0] * 3) == pytest.approx(3.0)


def test_a_sliding_window_uses_its_last_times_only():
    assert _limit("sliding-window(2, 0.5)", [100.0, 1.0, 3.0], [100.0] * 3) == pytest.approx(3.0)
    assert _limit("sliding-window(10, 1)", [1.0, 2.0, 3.0]) == pytest.approx(4.0)


def test_a_window_accepts_a_worker_that_stays_slow_sooner_than_a_running_average():
    def until_normal(text: str) -> int:
        times, steps = [1.0] * 20, 0
        while _limit(text, times) < 3.0:
            times.append(3.0)
            steps += 1
        return steps

    assert 0 < until_normal("sliding-window(10, 0.5)") < 10 < until_normal("running-average(0.5)")


@pytest.mark.parametrize("others", [2, 3, 7])
def test_median_mad_finds_a_worker_that_was_slow_from_the_start(others):
    assert _limit("median-mad", [5.0] * 3, *[[1.0] * 3] * others) == pytest.approx(1.5)


def test_median_mad_widens_with_the_spread_of_times():
    spread = [[0.8, 1.0, 1.2]] * 5
    centre, deviation = 1.0, 1.4826 * 0.2
    assert _limit("median-mad(k=5, floor=0.1)", *spread) == pytest.approx(centre + 5 * deviation)
    assert _limit("median-mad(k=5, floor=2)", *spread) == pytest.approx(3.0)


def test_median_mad_accepts_equal_workers_with_jitter():
    rng = random.Random(3)
    times = [[rng.normalvariate(1.0, 0.1) for _ in range(20)] for _ in range(8)]
    assert all(_limit("median-mad", *times) > max(own) for own in times)


def test_median_mad_finds_no_straggler_if_half_of_the_workers_are_slow():
    assert _limit("median-mad", [3.0] * 5, [3.0] * 5, [1.0] * 5, [1.0] * 5) > 3.0


def test_median_mad_is_not_moved_by_one_worker_however_slow():
    normal = [[1.0] * 5] * 4
    assert _limit("median-mad", [1e9] * 5, *normal) == _limit("median-mad", [5.0] * 5, *normal)


def test_median_mad_uses_the_last_times_only():
    assert _limit("median-mad(width=3)", *[[9.0] * 10 + [1.0] * 3] * 3) == pytest.approx(1.5)


@pytest.mark.parametrize("name", NAMES)
def test_no_worker_is_slow_before_there_are_enough_times(name):
    detector = DETECTORS.build(f"{name}(after=4)")
    assert detector.limit([1.0] * 3, [[1.0] * 9] * 3) == math.inf
    assert detector.limit([1.0] * 4, [[1.0] * 9] * 3) < math.inf
    assert detector.limits([[], []]) == [math.inf, math.inf]


@pytest.mark.parametrize("name", NAMES)
def test_limits_of_all_workers_equal_each_workers_limit(name):
    rng = random.Random(5)
    detector = DETECTORS.build(name)
    times = [deque((rng.uniform(1, 3) for _ in range(count)), maxlen=KEPT) for count in (0, 2, 3, 30, 200)]
    limits = detector.limits(times)
    assert limits == [
        pytest.approx(detector.limit(own, [other for j, other in enumerate(times) if j != i]))
        for i, own in enumerate(times)
    ]
    assert math.isfinite(limits[-1])


@pytest.mark.parametrize(
    "text",
    [
        "running-average(0)",
        "running-average(-0.5)",
        "running-average(inf)",
        "running-average(after=0)",
        f"running-average(after={KEPT + 1})",
        "sliding-window(0)",
        f"sliding-window({KEPT + 1})",
        "sliding-window(threshold=0)",
        "sliding-window(after=0)",
        "median-mad(k=-1)",
        "median-mad(k=nan)",
        "median-mad(floor=0)",
        "median-mad(width=0)",
        "median-mad(after=0)",
    ],
)
def test_an_invalid_option_is_refused_with_a_fix(text):
    with pytest.raises(ConfigError) as refused:
        DETECTORS.build(text)
    assert refused.value.fix
    assert refused.value.where


def test_an_unknown_detector_is_refused_with_the_nearest_name():
    with pytest.raises(UnknownName, match="did you mean 'median-mad'"):
        DETECTORS.build("median-map")
