"""Broadcast and all-gather for any number of workers, source and length, run in memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.cost import LinkCost, critical_work
from echelon.comm.schedule.spread import broadcast, gather_all
from schedules import execute, sent_elements

SIZES = st.integers(1, 17)
size_and_source = SIZES.flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))
LENGTHS = st.integers(0, 70)

small_and_large = pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
modest = settings(max_examples=60, deadline=None)


@small_and_large
@given(size_and_source, LENGTHS, st.booleans())
@modest
def test_every_worker_gets_the_elements_of_the_source(large, size_and_source, length, hold):
    size, source = size_and_source
    schedules = [broadcast(rank, size, length, source, large=large) for rank in range(size)]
    buffers = [[(rank, at) for at in range(length)] for rank in range(size)]
    assert execute(schedules, buffers, hold=hold) == [buffers[source]] * size


@small_and_large
@given(SIZES, st.integers(0, 6), st.booleans())
@modest
def test_every_worker_gets_every_block(large, size, length_each, hold):
    schedules = [gather_all(rank, size, length_each, large=large) for rank in range(size)]
    buffers = [
        [at if at // length_each == rank else None for at in range(size * length_each)]
        for rank in range(size)
    ]
    whole = list(range(size * length_each))
    assert execute(schedules, buffers, hold=hold) == [whole] * size


@given(size_and_source, st.integers(1, 20))
@modest
def test_a_small_broadcast_takes_lg_p_steps(size_and_source, length):
    size, source = size_and_source
    schedules = [broadcast(rank, size, length, source) for rank in range(size)]
    work = critical_work(dict(enumerate(schedules)), LinkCost(latency_s=1.0, seconds_per_byte=0.0), 0.0)
    assert work.steps == (size - 1).bit_length()


@given(size_and_source, st.integers(1, 5))
@modest
def test_no_worker_sends_a_large_buffer_twice(size_and_source, part):
    size, source = size_and_source
    length = size * part
    for rank in range(size):
        assert sent_elements(broadcast(rank, size, length, source, large=True)) <= 2 * (length - part)


@small_and_large
@given(SIZES, st.integers(1, 5))
@modest
def test_a_gather_sends_every_block_to_every_other_worker_once(large, size, length_each):
    schedules = [gather_all(rank, size, length_each, large=large) for rank in range(size)]
    assert {sent_elements(schedule) for schedule in schedules} == {(size - 1) * length_each}
    assert {len(schedule) for schedule in schedules} == {size - 1 if large else min(size - 1, 1)}
