"""Every collective, built-in or third-party, for any number of workers and any length. tests/schedules.py
runs the schedules of all workers in memory, and also checks that they keep the rules.
"""

from __future__ import annotations

import math
import random
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.collective import COLLECTIVES, Scattering
from echelon.comm.schedule.collectives.binary_blocks import blocks
from echelon.comm.schedule.collectives.ps import served
from echelon.comm.schedule.cost import LinkCost, critical_work
from echelon.errors import ConfigError
from schedules import execute, sent_elements

SIZES = st.integers(1, 17)
LENGTHS = st.integers(0, 70)
SEEDS = st.integers(0, 2**32)
FLAT = ("ring", "direct", "butterfly", "halving-doubling", "binary-blocks", "ps")
SCATTERING = [name for name in COLLECTIVES.names() if issubclass(COLLECTIVES.get(name), Scattering)]

every_collective = pytest.mark.parametrize("name", COLLECTIVES.names())
modest = settings(max_examples=40, deadline=None)
power_of_two = st.integers(0, 4).map(lambda bits: 1 << bits)


def _schedules(collective, size, length):
    return [collective.schedule(rank, size, length) for rank in range(size)]


def _integers(size, length, seed):
    rng = random.Random(seed)
    return [[rng.randrange(-1000, 1000) for _ in range(length)] for _ in range(size)]


def _floats(size, length, seed):
    """Floats of very different magnitudes, so that the order of additions changes the result."""
    rng = random.Random(seed)
    return [
        [rng.uniform(-1, 1) * 2.0 ** rng.randrange(-40, 40) for _ in range(length)] for _ in range(size)
    ]


def _columns(buffers, length):
    return [[buffer[index] for buffer in buffers] for index in range(length)]


def _assert_sums(collective, size, length, seed, hold):
    buffers = _integers(size, length, seed)
    results = execute(_schedules(collective, size, length), buffers, hold=hold, seed=seed)
    assert results == [[sum(column) for column in _columns(buffers, length)]] * size


def _assert_same_bits(collective, size, length, seed, hold):
    buffers = _floats(size, length, seed)
    results = execute(_schedules(collective, size, length), buffers, hold=hold, seed=seed)
    assert len({struct.pack(f"{length}d", *result) for result in results}) == 1
    for got, column in zip(results[0], _columns(buffers, length), strict=True):
        assert got == pytest.approx(math.fsum(column), abs=1e-12 * math.fsum(map(abs, column)))


@every_collective
@given(SIZES, LENGTHS, SEEDS, st.booleans())
@modest
def test_every_worker_ends_with_the_sum(name, size, length, seed, hold):
    _assert_sums(COLLECTIVES.build(name), size, length, seed, hold)


@every_collective
@given(SIZES, LENGTHS, SEEDS, st.booleans())
@modest
def test_every_worker_ends_with_the_same_bits_for_any_order_of_arrival(name, size, length, seed, hold):
    _assert_same_bits(COLLECTIVES.build(name), size, length, seed, hold)


@every_collective
@given(SIZES, LENGTHS)
@settings(max_examples=15, deadline=None)
def test_a_lone_worker_or_an_empty_buffer_needs_no_step(name, size, length):
    collective = COLLECTIVES.build(name)
    assert collective.schedule(0, 1, length) == []
    assert _schedules(collective, size, 0) == [[]] * size


@st.composite
def _hierarchies(draw):
    """A hierarchy of any shape, and its number of workers."""
    size = draw(SIZES)
    flat = st.sampled_from(FLAT)
    inner = draw(flat | st.just("hierarchical(group=2)"))
    outer = draw(flat | st.sampled_from(["hierarchical", "hierarchical(group=2, outer=butterfly)"]))
    if draw(st.booleans()):
        cuts = draw(st.sets(st.integers(1, size), max_size=4)) | {0, size}
        groups = f"sizes={[stop - start for start, stop in pairwise(sorted(cuts))]}"
    else:
        groups = f"group={draw(st.integers(0, size + 1))}"
    rails = draw(st.sampled_from(["true", "false"]))
    return f"hierarchical({groups}, inner={inner}, outer={outer}, rails={rails})", size


@given(_hierarchies(), LENGTHS, SEEDS, st.booleans())
@settings(max_examples=200, deadline=None)
def test_hierarchies_of_any_shape_give_the_sum(hierarchy, length, seed, hold):
    text, size = hierarchy
    _assert_sums(COLLECTIVES.build(text), size, length, seed, hold)
    _assert_same_bits(COLLECTIVES.build(text), size, length, seed, hold)


@given(SIZES.flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size))), LENGTHS, SEEDS)
@modest
def test_any_number_of_servers_gives_the_sum(size_and_servers, length, seed):
    size, servers = size_and_servers
    _assert_sums(COLLECTIVES.build(f"ps(servers={servers})"), size, length, seed, hold=False)


@pytest.mark.parametrize("name", SCATTERING)
@given(SIZES, LENGTHS, SEEDS, st.booleans())
@modest
def test_between_the_halves_each_element_has_one_owner_that_holds_its_sum(name, size, length, seed, hold):
    collective = COLLECTIVES.build(name)
    owned = [collective.owned_range(rank, size, length) for rank in range(size)]
    elements = [element for start, stop in owned for element in range(start, stop)]
    assert sorted(elements) == list(range(length))

    buffers = _integers(size, length, seed)
    totals = [sum(column) for column in _columns(buffers, length)]
    scatter = [collective.reduce_scatter(rank, size, length) for rank in range(size)]
    half = execute(scatter, buffers, hold=hold, seed=seed)
    for buffer, (start, stop) in zip(half, owned, strict=True):
        assert buffer[start:stop] == totals[start:stop]

    gather = [collective.all_gather(rank, size, length) for rank in range(size)]
    only_owned = [
        [total if start <= at < stop else None for at, total in enumerate(totals)] for start, stop in owned
    ]
    assert execute(gather, only_owned, hold=hold, seed=seed) == [totals] * size


@pytest.mark.parametrize("name", ["ring", "direct"])
@given(SIZES, st.integers(0, 5))
@modest
def test_every_worker_sends_the_minimum_of_bytes(name, size, part):
    for schedule in _schedules(COLLECTIVES.build(name), size, part * size):
        assert sent_elements(schedule) == 2 * (size - 1) * part


@pytest.mark.parametrize("name", ["halving-doubling", "binary-blocks"])
@given(power_of_two, st.integers(0, 5))
@modest
def test_halving_of_powers_of_two_sends_the_bytes_of_a_ring(name, size, part):
    for schedule in _schedules(COLLECTIVES.build(name), size, part * size):
        assert sent_elements(schedule) == 2 * (size - 1) * part


@given(SIZES, st.integers(1, 5))
@modest
def test_a_binary_block_sends_one_more_share_for_each_neighbouring_block(size, part):
    found = blocks(size)
    length = part * len(found[0])
    collective = COLLECTIVES.build("binary-blocks")
    for at, block in enumerate(found):
        share = length // len(block)
        neighbours = (at > 0) + (at + 1 < len(found))
        for rank in block:
            sent = sent_elements(collective.schedule(rank, size, length))
            assert sent == 2 * (length - share) + neighbours * share


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.booleans())
@modest
def test_a_group_of_a_hierarchy_sends_its_buffer_out_less_than_twice(groups, members, part, rails):
    """With and without rails."""
    size, length = groups * members, groups * members * part
    text = f"hierarchical(group={members}, rails={str(rails).lower()})"
    schedules = _schedules(COLLECTIVES.build(text), size, length)

    def sent_outside(rank):
        moves = [move for step in schedules[rank] for move in step.sends]
        return sum(move.length for move in moves if move.peer // members != rank // members)

    for group in range(groups):
        ranks = range(group * members, (group + 1) * members)
        outside = [sent_outside(rank) for rank in ranks]
        assert sum(outside) == 2 * (groups - 1) * length // groups
        if rails:
            assert len(set(outside)) == 1
        else:
            assert sum(outside[1:]) == 0


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.booleans())
@modest
def test_unequal_groups_have_as_many_rails_as_the_smallest_has_members(sizes, rails):
    size = sum(sizes)
    group_of = [group for group, members in enumerate(sizes) for _ in range(members)]
    text = f"hierarchical(sizes={sizes}, rails={str(rails).lower()})"
    schedules = _schedules(COLLECTIVES.build(text), size, 120)
    outside = {
        rank
        for rank, schedule in enumerate(schedules)
        if any(group_of[move.peer] != group_of[rank] for step in schedule for move in step.sends)
    }
    expected = min(sizes) if rails else 1
    assert [sum(group_of[rank] == group for rank in outside) for group in range(len(sizes))] == [
        expected for _ in sizes
    ]


@pytest.mark.parametrize("rails", ["true", "false"])
@pytest.mark.parametrize("inner", FLAT)
@given(SIZES, LENGTHS)
@settings(max_examples=10, deadline=None)
def test_hierarchy_of_a_single_group_equals_its_inner_collective(inner, rails, size, length):
    hierarchy = COLLECTIVES.build(f"hierarchical(group=17, inner={inner}, rails={rails})")
    assert _schedules(hierarchy, size, length) == _schedules(COLLECTIVES.build(inner), size, length)


def test_a_single_rail_distributes_the_result_along_a_tree():
    text = "hierarchical(group=8, inner=butterfly, outer=butterfly, rails=false)"
    schedules = _schedules(COLLECTIVES.build(text), 16, 64)
    work = critical_work(dict(enumerate(schedules)), LinkCost(latency_s=1.0, seconds_per_byte=0.0), 0.0)
    assert (work.steps, work.further_messages) == (3 + 1 + 3, 0)


@given(power_of_two)
@modest
def test_halving_exchanges_the_most_with_the_nearest_worker(size):
    for rank in range(size):
        schedule = COLLECTIVES.build("halving-doubling").schedule(rank, size, 8 * size)
        sent = {move.peer: move.length for step in schedule for move in step.sends if step.adds}
        assert sorted(sent, key=sent.__getitem__, reverse=True) == sorted(sent, key=lambda p: p ^ rank)


@given(
    workers=st.integers(2, 6),
    servers=st.integers(1, 4),
    length=st.integers(0, 12),
    hold=st.booleans(),
)
def test_separate_servers_sum_only_the_workers_buffers(workers, servers, length, hold):
    total = workers + servers
    schedules = [served(rank, workers, servers, length) for rank in range(total)]
    buffers = [[10**rank * (at + 1) for at in range(length)] for rank in range(total)]
    found = execute(schedules, buffers, hold=hold)
    expected = [sum(10**rank for rank in range(workers)) * (at + 1) for at in range(length)]
    assert found[:workers] == [expected] * workers


@given(st.integers(2, 17), st.integers(1, 3))
@modest
def test_number_of_steps_equals_the_formula(size, part):
    length = size * part
    bits = size.bit_length() - 1
    power = 1 << bits

    def steps(name, workers):
        return {len(s) for s in _schedules(COLLECTIVES.build(name), workers, workers * part)}

    assert steps("ring", size) == {2 * (size - 1)}
    assert steps("direct", size) == {2}
    assert steps("ps", size) == {2}
    assert steps("butterfly", power) == {bits}
    assert steps("halving-doubling", power) == {2 * bits}
    assert steps("binary-blocks", power) == {2 * bits}
    largest = max(len(s) for s in _schedules(COLLECTIVES.build("binary-blocks"), size, length))
    assert largest <= 2 * bits + 2


@given(power_of_two, LENGTHS)
@modest
def test_blocks_of_a_power_of_two_are_halving_and_doubling(size, length):
    one, other = COLLECTIVES.build("binary-blocks"), COLLECTIVES.build("halving-doubling")
    assert _schedules(one, size, length) == _schedules(other, size, length)


@given(SIZES, LENGTHS)
@modest
def test_as_many_servers_as_workers_equals_a_direct_exchange(size, length):
    servers, direct = COLLECTIVES.build(f"ps(servers={size})"), COLLECTIVES.build("direct")
    assert _schedules(servers, size, length) == _schedules(direct, size, length)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any), LENGTHS, SEEDS, st.booleans())
@modest
def test_direct_with_unequal_parts_sums_and_a_worker_of_weight_zero_sums_nothing(
    weights, length, seed, hold
):
    collective = COLLECTIVES.build(f"direct(weights={weights})")
    size = len(weights)
    _assert_sums(collective, size, length, seed, hold)
    _assert_same_bits(collective, size, length, seed, hold)
    for rank, weight in enumerate(weights):
        start, stop = collective.owned_range(rank, size, length)
        assert abs((stop - start) - length * weight / sum(weights)) <= 1
        if not weight and size > 1:
            adds = [move for step in collective.schedule(rank, size, length) for move in step.adds]
            assert sum(move.length for move in adds) == 0


@pytest.mark.parametrize("text", ["direct(weights=[0, 0])", "direct(weights=[1, -1])"])
def test_weights_that_leave_nobody_to_sum_are_refused(text):
    with pytest.raises(ConfigError, match="weights cannot be"):
        COLLECTIVES.build(text)
