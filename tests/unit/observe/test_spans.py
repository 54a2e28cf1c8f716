from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.events import StepEnded
from echelon.observe.spans import ACTIVITIES, end_of, length_s, other_s, spans

_SECONDS = st.floats(0, 100)


def _step(t: float, start: float, arrival: float, *parts: float) -> StepEnded:
    data_s, compute_s, wait_s, apply_s = parts
    return StepEnded(
        t=t,
        rank=0,
        step=0,
        epoch=0,
        start=start,
        data_s=data_s,
        compute_s=compute_s,
        arrival=arrival,
        wait_s=wait_s,
        apply_s=apply_s,
        share=1,
        batch=1,
        sent_bytes=0,
    )


def test_the_parts_of_an_ordinary_step_follow_each_other():
    step = _step(20.0, 10.0, 15.0, 1.0, 3.0, 2.0, 0.5)
    assert spans(step) == {
        "data": (10.0, 11.0),
        "compute": (12.0, 15.0),
        "wait": (15.0, 17.0),
        "apply": (17.0, 17.5),
    }
    assert (end_of(step), length_s(step), other_s(step)) == (20.0, 10.0, 3.5)


def test_several_rounds_in_one_step_stay_within_it():
    step = _step(20.0, 10.0, 19.0, 0.0, 2.0, 8.0, 0.0)
    assert end_of(step) == 20.0
    assert spans(step)["wait"] == (19.0, 20.0)


@settings(max_examples=100)
@given(_SECONDS, _SECONDS, _SECONDS, st.tuples(_SECONDS, _SECONDS, _SECONDS, _SECONDS))
def test_parts_follow_each_other_within_the_step_even_if_the_clock_was_set(t, start, arrival, parts):
    step = _step(t, start, arrival, *parts)
    placed = spans(step)
    assert tuple(placed) == ACTIVITIES
    edges = [start, *(edge for span in placed.values() for edge in span), end_of(step)]
    assert all(one <= other for one, other in pairwise(edges))
    assert other_s(step) >= 0
    assert length_s(step) == pytest.approx(sum(parts) + other_s(step))
