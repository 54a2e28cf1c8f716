import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cluster.pace import Pace
from echelon.errors import ConfigError


class Clocks:
    """Fake CPU and wall clocks; `overslept_s` is added to every sleep."""

    def __init__(self, overslept_s: float = 0.0) -> None:
        self.cpu_s = 100.0
        self.wall_s = 5000.0
        self.overslept_s = overslept_s
        self.reads = 0

    def read_cpu(self) -> float:
        self.reads += 1
        return self.cpu_s

    def read_wall(self) -> float:
        self.reads += 1
        return self.wall_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.wall_s += seconds + self.overslept_s

    def compute(self, seconds: float, *, preempted_s: float = 0.0) -> None:
        self.cpu_s += seconds
        self.wall_s += seconds + preempted_s

    def pace(self, speed: float) -> Pace:
        return Pace(speed, cpu_clock=self.read_cpu, wall_clock=self.read_wall, sleep=self.sleep)


speeds = st.floats(min_value=0.01, max_value=1.0)
computations = st.lists(st.floats(min_value=0.0, max_value=10.0), min_size=1, max_size=20)


@settings(deadline=None, max_examples=100)
@given(speed=speeds, parts=computations)
def test_the_total_sleep_depends_only_on_the_total_computation(speed, parts):
    clocks = Clocks()
    pace = clocks.pace(speed)
    pace.start()
    returned = 0.0
    for part in parts:
        clocks.compute(part)
        returned += pace.catch_up()
        owed_s = (clocks.cpu_s - 100.0) * (1 / speed - 1)
        assert pace.slept_s == pytest.approx(owed_s, rel=1e-6, abs=1e-6)
    assert returned == pytest.approx(pace.slept_s)
    assert clocks.wall_s - 5000.0 == pytest.approx(math.fsum(parts) / speed, rel=1e-6, abs=1e-6)


@settings(deadline=None, max_examples=100)
@given(speed=speeds, parts=computations, overslept_s=st.floats(min_value=0.0, max_value=2.0))
def test_a_sleep_that_took_too_long_is_deducted_from_the_next(speed, parts, overslept_s):
    clocks = Clocks(overslept_s)
    pace = clocks.pace(speed)
    pace.start()
    for part in parts:
        clocks.compute(part)
        pace.catch_up()
        owed_s = (clocks.cpu_s - 100.0) * (1 / speed - 1)
        really_slept_s = (clocks.wall_s - 5000.0) - (clocks.cpu_s - 100.0)
        assert owed_s - 1e-6 <= really_slept_s <= owed_s + overslept_s + 1e-6
        assert pace.slept_s == pytest.approx(really_slept_s, abs=1e-6)


def test_time_used_by_other_processes_causes_no_sleep():
    clocks = Clocks()
    pace = clocks.pace(0.5)
    pace.start()
    clocks.compute(1.0, preempted_s=3.0)
    assert pace.catch_up() == pytest.approx(1.0)


def test_second_call_without_computation_in_between_does_not_sleep():
    clocks = Clocks()
    pace = clocks.pace(0.25)
    pace.start()
    clocks.compute(1.0)
    assert pace.catch_up() == pytest.approx(3.0)
    assert pace.catch_up() == 0.0


def test_every_start_begins_a_new_count():
    clocks = Clocks()
    pace = clocks.pace(0.5)
    pace.start()
    clocks.compute(2.0)
    pace.catch_up()
    clocks.compute(7.0)  # between computations: not paced
    pace.start()
    assert pace.slept_s == 0.0
    clocks.compute(1.0)
    assert pace.catch_up() == pytest.approx(1.0)


def test_full_speed_reads_no_clock_and_never_sleeps():
    clocks = Clocks()
    pace = clocks.pace(1.0)
    pace.start()
    clocks.compute(2.0)
    assert pace.catch_up() == 0.0
    assert pace.slept_s == 0.0
    assert clocks.reads == 0


def test_no_sleep_is_due_before_the_first_start():
    clocks = Clocks()
    pace = clocks.pace(0.5)
    clocks.compute(2.0)
    assert pace.catch_up() == 0.0


def test_real_clocks_are_the_default():
    pace = Pace(0.5)
    pace.start()
    total = 0.0
    while total == 0.0:  # compute until the clock has advanced
        sum(range(10_000))
        total += pace.catch_up()
    assert pace.slept_s == total


@pytest.mark.parametrize("speed", [0.0, -0.5, 1.01, math.nan, math.inf])
def test_speed_outside_zero_to_one_is_refused(speed):
    with pytest.raises(ConfigError, match="speed is"):
        Pace(speed)
