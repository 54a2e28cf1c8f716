"""Links are measured again if gradients travel slower or faster, and not for other reasons."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.congestion import TailWatch


def alarms(watch, tails, step_s=0.1):
    return [at for at, tail_s in enumerate(tails) if watch.take(tail_s, step_s)]


@given(st.integers(0, 2**32), st.floats(0, 0.1), st.floats(0.001, 0.09))
def test_noise_of_a_tenth_never_alarms(seed, noise, tail_s):
    draw = random.Random(seed)
    assert alarms(TailWatch(), [tail_s * (1 + noise * draw.uniform(-1, 1)) for _ in range(400)]) == []


def test_a_link_that_becomes_slow_alarms_once_and_again_when_it_is_free():
    watch = TailWatch()
    assert alarms(watch, [0.01] * 40) == []
    assert len(alarms(watch, [0.05] * 100)) == 1
    assert len(alarms(watch, [0.01] * 200)) == 1


def test_tails_that_are_short_for_a_step_do_not_matter():
    assert alarms(TailWatch(), [0.001] * 40 + [0.005] * 200) == []


def test_one_busy_moment_does_not_alarm():
    assert alarms(TailWatch(), [0.01] * 40 + [0.08] * 8 + [0.01] * 200) == []


def test_a_network_that_never_rests_is_measured_more_and_more_seldom():
    found = alarms(TailWatch(), [0.01 if at // 40 % 2 else 0.06 for at in range(4000)])
    assert 2 <= len(found) <= 8
    pauses = [after - before for before, after in pairwise(found)]
    assert pauses[-1] > pauses[0]
