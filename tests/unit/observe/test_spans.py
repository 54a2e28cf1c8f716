from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.events import StepEnded
from echelon.observe.spans import (
    ACTIVITIES,
    end_of,
    exchanged_s,
    exchanges,
    length_s,
    other_s,
    result_of,
    spans,
)

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
    assert spans(step) == [
        ("data", 10.0, 11.0),
        ("compute", 12.0, 15.0),
        ("wait", 15.0, 17.0),
        ("apply", 17.0, 17.5),
    ]
    assert (end_of(step), length_s(step), other_s(step)) == (20.0, 10.0, 3.5)


def test_several_rounds_in_one_step_stay_within_it():
    step = _step(20.0, 10.0, 19.0, 0.0, 2.0, 8.0, 0.0)
    assert end_of(step) == 20.0
    assert spans(step)[-1] == ("wait", 19.0, 20.0)


def test_exchanges_interrupt_computing_or_follow_the_optimizer():
    step = msgspec.structs.replace(
        _step(20.0, 10.0, 15.0, 1.0, 2.0, 4.5, 0.5),
        exchanges_us=[(2_000_000, 1_000_000), (500_000, 500_000), (3_000_000, 2_000_000)],
    )
    assert exchanges(step) == [(12.0, 13.0), (13.5, 14.0), (17.0, 19.0)]
    assert (exchanged_s(step), result_of(step)) == (3.5, 16.0)
    assert spans(step) == [
        ("data", 10.0, 11.0),
        ("compute", 11.5, 12.0),
        ("wait", 12.0, 13.0),
        ("compute", 13.0, 13.5),
        ("wait", 13.5, 14.0),
        ("compute", 14.0, 15.0),
        ("wait", 15.0, 16.0),
        ("apply", 16.0, 16.5),
        ("wait", 17.0, 19.0),
    ]


def test_a_wait_for_the_round_before_is_shown_before_computing():
    step = msgspec.structs.replace(_step(20.0, 10.0, 15.0, 1.0, 3.0, 1.0, 0.5), deferred_s=1.0)
    assert spans(step)[:3] == [("data", 10.0, 11.0), ("wait", 11.0, 12.0), ("compute", 12.0, 15.0)]


@settings(max_examples=100)
@given(
    _SECONDS,
    _SECONDS,
    _SECONDS,
    st.tuples(_SECONDS, _SECONDS, _SECONDS, _SECONDS),
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=4),
)
def test_parts_follow_each_other_within_the_step_even_if_the_clock_was_set(t, start, arrival, parts, met):
    step = msgspec.structs.replace(_step(t, start, arrival, *parts), exchanges_us=met)
    placed = spans(step)
    assert {activity for activity, _, _ in placed} <= set(ACTIVITIES)
    edges = [start, *(edge for _, *span in placed for edge in span), end_of(step)]
    assert all(one <= other for one, other in pairwise(edges))
    assert other_s(step) >= 0
    assert length_s(step) == pytest.approx(sum(parts) + other_s(step))
