"""Bucket sizes: for any links and number of workers, as small as latency allows."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.cost import LinkCost, choose
from echelon.reduce.packing import BUCKET_BYTES, FIRST_BYTES, LEAST_BYTES, MOST_BYTES, Item, assign, sizes

latencies = st.floats(0, 0.1)
rates = st.floats(1e4, 1e11)
workers = st.integers(2, 16)
several = settings(max_examples=60, deadline=None)
GIGABIT = LinkCost(latency_s=1e-4, seconds_per_byte=1 / 1.18e8)


def _link(latency_s: float, bytes_per_s: float) -> LinkCost:
    return LinkCost(latency_s=latency_s, seconds_per_byte=1 / bytes_per_s)


def _too_long(link: LinkCost, size: int, length_bytes: int) -> float:
    """The relative cost of latency for a bucket."""
    name, costs, _ = choose(size, length_bytes, link)
    return costs[name] / (2 * (size - 1) / size * length_bytes * link.seconds_per_byte) - 1


@given(latencies, rates, workers)
@several
def test_sizes_are_powers_of_two_within_bounds_and_the_first_is_not_larger(latency_s, rate, size):
    first, other = sizes(_link(latency_s, rate), size)
    for length in (first, other):
        assert LEAST_BYTES <= length <= MOST_BYTES
        assert length.bit_count() == 1
    assert first == max(LEAST_BYTES, other // 4)


@given(latencies, rates, workers)
@several
def test_latency_costs_at_most_five_percent_and_more_with_smaller_buckets(latency_s, rate, size):
    link = _link(latency_s, rate)
    _, length = sizes(link, size)
    if length < MOST_BYTES:
        assert _too_long(link, size, length) <= 0.05 + 1e-9
    if length > LEAST_BYTES:
        assert _too_long(link, size, length // 2) > 0.05 - 1e-9


@given(latencies, latencies, rates, workers)
@several
def test_a_longer_latency_never_makes_buckets_smaller(one, other, rate, size):
    low, high = sorted((one, other))
    assert sizes(_link(low, rate), size) <= sizes(_link(high, rate), size)


@given(latencies, rates, rates, workers)
@several
def test_a_faster_link_never_makes_buckets_smaller(latency_s, one, other, size):
    low, high = sorted((one, other))
    assert sizes(_link(latency_s, low), size) <= sizes(_link(latency_s, high), size)


@given(latencies, rates, workers, st.integers(1, 1 << 28))
@several
def test_model_is_split_into_several_buckets(latency_s, rate, size, total_bytes):
    link = _link(latency_s, rate)
    first, other = sizes(link, size, total_bytes=total_bytes)
    assert (first, other) <= sizes(link, size)
    assert other == LEAST_BYTES or 4 * other <= total_bytes
    if total_bytes >= 4 * MOST_BYTES:
        assert (first, other) == sizes(link, size)


@given(st.lists(st.integers(1, 3_000_000), max_size=30), latencies, rates, workers)
@several
def test_buckets_of_the_same_model_are_always_the_same(lengths, latency_s, rate, size):
    def buckets() -> list[list[int]]:
        items = [Item(size_bytes=length, kind="float32") for length in lengths]
        first, other = sizes(_link(latency_s, rate), size, total_bytes=sum(lengths))
        return assign(items, first_bytes=first, bucket_bytes=other)

    assert buckets() == buckets()


@pytest.mark.parametrize(("size", "expected"), [(2, 512 << 10), (4, 1 << 20), (8, 1 << 20), (7, 2 << 20)])
def test_at_one_gigabit_buckets_hold_about_a_megabyte(size, expected):
    assert sizes(GIGABIT, size)[1] == expected


def test_ring_bucket_size_is_twenty_times_workers_times_latency_over_seconds_per_byte():
    exact = 1 << 20
    link = LinkCost(latency_s=exact / 20 / 3 * 1e-8, seconds_per_byte=1e-8)
    assert sizes(link, 3)[1] == exact
    assert sizes(LinkCost(latency_s=link.latency_s * 1.01, seconds_per_byte=1e-8), 3)[1] == 2 * exact


def test_shared_memory_and_a_single_worker_use_the_default_sizes():
    assert sizes(None, 4) == (FIRST_BYTES, BUCKET_BYTES) == (1 << 20, 8 << 20)
    assert sizes(GIGABIT, 1) == (FIRST_BYTES, BUCKET_BYTES)


def test_link_with_unlimited_bandwidth_gets_the_largest_buckets():
    assert sizes(LinkCost(latency_s=1e-4, seconds_per_byte=0.0), 4)[1] == MOST_BYTES
