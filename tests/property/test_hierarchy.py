"""A hierarchy is a partition at each level, and its text is a collective that accepts its nodes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.collective import COLLECTIVES
from echelon.config.call import parse_call
from echelon.plan.hierarchy import (
    Hierarchy,
    Level,
    candidate_hierarchies,
    from_collective,
    nested_sizes,
    square_root_sizes,
)
from echelon.plan.topology import Topology, Uplink
from networks import GBIT, machine
from schedules import execute


@st.composite
def topologies(draw):
    sites = [f"s{at}" for at in range(draw(st.integers(1, 4)))]
    nodes = [
        machine(f"{site}-{at}", site, rate=draw(st.floats(0.1, 1)) * GBIT, speed=draw(st.floats(0.01, 1)))
        for site in sites
        for at in range(draw(st.integers(1, 7)))
    ]
    uplinks = tuple(
        Uplink(between=(sites[draw(st.integers(0, at))], site), bytes_per_s=draw(st.floats(0.01, 1)) * GBIT)
        for at, site in enumerate(sites[1:])
    )
    return Topology(nodes=tuple(draw(st.permutations(nodes))), uplinks=uplinks)


def check_partition(tree, names):
    assert sorted(tree.order) == sorted(names)
    for level in range(len(tree.levels)):
        groups = tree.groups(level)
        assert sorted(name for group in groups for name in group) == sorted(names)
        assert all(groups)


@settings(max_examples=50)
@given(topologies())
def test_every_candidate_is_a_partition_whose_collective_accepts_its_nodes(topology):
    names = [node.name for node in topology.nodes]
    found = candidate_hierarchies(topology, names)
    assert found[0].collective == "ring"
    assert len({(one.order, one.collective) for one in found}) == len(found)
    for tree in found:
        check_partition(tree, names)
        COLLECTIVES.build(tree.collective).check(len(names))
        assert str(parse_call(tree.collective)) == tree.collective
        again = from_collective(tree.collective, tree.order)
        assert (again.order, again.levels, again.top) == (tree.order, tree.levels, tree.top)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(2, 12))
def test_divided_groups_have_at_most_as_many_members_as_allowed(groups, most):
    levels = nested_sizes(groups, most)
    assert sum(levels[0]) == sum(groups)
    for lower, upper in pairwise(levels):
        assert sum(upper) == len(lower)
    assert len(levels[-1]) == len(groups)
    assert all(1 <= size <= most for level in levels for size in level)
    tree = Hierarchy(
        order=tuple(map(str, range(sum(groups)))), levels=tuple(Level(sizes=sizes) for sizes in levels)
    )
    assert [len(group) for group in tree.groups(len(levels) - 1)] == groups


@given(st.integers(1, 3000), st.integers(2, 12))
def test_no_ring_of_repeated_square_roots_is_too_large(count, most):
    levels = square_root_sizes(count, most)
    top = len(levels[-1]) if levels else count
    assert top <= most
    assert all(size <= most for level in levels for size in level)


@settings(max_examples=25)
@given(topologies(), st.data())
def test_every_candidate_sums(topology, data):
    size, length = len(topology.nodes), data.draw(st.integers(1, 20))
    found = candidate_hierarchies(topology, [node.name for node in topology.nodes])
    collective = COLLECTIVES.build(data.draw(st.sampled_from(found)).collective)
    schedules = [collective.schedule(rank, size, length) for rank in range(size)]
    buffers = [[10**rank + at for at in range(length)] for rank in range(size)]
    total = [sum(column) for column in zip(*buffers, strict=True)]
    assert execute(schedules, buffers) == [total] * size
