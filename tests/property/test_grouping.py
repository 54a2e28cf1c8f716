"""Groups are a partition within their limits, and equal-power groups never worse than a deal."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.plan.equal_power import equal_power_groups
from echelon.plan.grouping import form_groups, limit_size, order_limits, random_groups, separate
from echelon.plan.topology import Topology, Uplink
from networks import GBIT, machine

SPEEDS = st.lists(st.floats(0.01, 100), min_size=1, max_size=24)


@st.composite
def topologies(draw):
    """Up to 20 nodes in up to four sites in a line, with any speeds and rates."""
    count = draw(st.integers(1, 20))
    nodes = tuple(
        machine(
            f"n{at}",
            f"s{draw(st.integers(0, 3))}",
            rate=draw(st.floats(0.01, 10)) * GBIT,
            speed=draw(st.floats(0.01, 10)),
        )
        for at in range(count)
    )
    sites = list(dict.fromkeys(node.site for node in nodes))
    uplinks = tuple(
        Uplink(between=(one, other), bytes_per_s=draw(st.floats(0.01, 10)) * GBIT)
        for one, other in pairwise(sites)
    )
    return Topology(nodes=nodes, uplinks=uplinks)


@given(topologies(), st.none() | st.integers(1, 8), st.integers(0, 9))
def test_every_node_is_in_exactly_one_group_within_the_limit(topology, most, seed):
    names = sorted(node.name for node in topology.nodes)
    grouping = form_groups(topology, most=most, seed=seed)
    assert sorted(name for group in grouping.groups for name in group) == names
    assert all(1 <= len(group) <= (most or len(names)) for group in grouping.groups)
    assert grouping.reason.endswith(".")
    assert sorted(name for group in separate(topology) for name in group) == names


@settings(max_examples=200)
@given(SPEEDS, st.data())
def test_equal_power_groups_are_within_limits_and_never_worse_than_a_deal(speeds, data):
    count = data.draw(st.integers(1, len(speeds)))
    least = data.draw(st.integers(1, len(speeds) // count))
    most = data.draw(st.integers(math.ceil(len(speeds) / count), len(speeds)))
    names = [str(at) for at in range(len(speeds))]
    groups = equal_power_groups(names, speeds, count, least=least, most=most)
    assert sorted(int(name) for group in groups for name in group) == list(range(len(speeds)))
    assert len(groups) == count
    assert all(least <= len(group) <= most for group in groups)

    def spread(some):
        totals = [math.fsum(speeds[int(name)] for name in group) for group in some]
        return max(totals) - min(totals)

    by_speed = sorted(names, key=lambda name: -speeds[int(name)])
    for dealt in (names, by_speed):
        assert spread(groups) <= spread([dealt[at::count] for at in range(count)]) + 1e-6


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_random_groups_are_a_partition_of_even_sizes(nodes, count, seed):
    names = [str(at) for at in range(nodes)]
    groups = random_groups(names, count, seed=seed)
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert len(groups) == min(count, nodes)
    sizes = [len(group) for group in groups]
    assert max(sizes) - min(sizes) <= 1


@given(SPEEDS, st.integers(1, 6), st.booleans())
def test_a_limit_cuts_groups_and_keeps_all_nodes(speeds, most, known):
    names = [str(at) for at in range(len(speeds))]
    powers = dict(zip(names, speeds, strict=True))
    groups = limit_size([names], most, powers if known else None)
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert all(len(group) <= most for group in groups)
    assert len(groups) == math.ceil(len(names) / most)


@given(SPEEDS, st.floats(0.001, 1000))
def test_orders_of_magnitude_do_not_depend_on_the_unit(values, unit):
    """Powers of ten are not special: in other units the same values are of one order."""

    def orders(scale):
        limits = order_limits([value * scale for value in values])
        return [sum(value * scale >= limit for limit in limits) for value in values]

    found = orders(1.0)
    assert len(set(found)) == len(order_limits(values)) + 1
    scaled = orders(2.0 ** round(math.log2(unit)))
    assert scaled == found
    for one, order in zip(values, found, strict=True):
        for other, same in zip(values, found, strict=True):
            if order == same:
                assert max(one, other) < 10 * min(one, other)
