"""Levels of groups, the text of their collective, and candidates for a search."""

from __future__ import annotations

import pytest

from echelon.comm.schedule.collective import COLLECTIVES
from echelon.errors import ConfigError
from echelon.plan.hierarchy import (
    Hierarchy,
    Level,
    candidate_hierarchies,
    from_collective,
    nested_sizes,
    root_count,
    square_root_sizes,
    to_collective,
)
from echelon.plan.topology import Topology, Uplink
from networks import GBIT, machine


def numbered(count):
    return tuple(f"n{at}" for at in range(count))


def two_sites(size=4, **rates):
    nodes = [
        machine(f"{site}{at}", site, rate=rates.get(f"{site}{at}", GBIT))
        for at in range(size)
        for site in "ab"
    ]
    return Topology(nodes=tuple(nodes), uplinks=(Uplink(between=("a", "b"), bytes_per_s=GBIT / 10),))


def test_a_flat_hierarchy_is_its_top():
    assert to_collective(Hierarchy(order=numbered(3))) == "ring"
    assert to_collective(Hierarchy(order=numbered(3), top="ps")) == "ps"


def test_groups_become_a_hierarchical_collective():
    tree = Hierarchy(order=numbered(11), levels=(Level(sizes=(4, 4, 3)),), top="ps")
    text = "hierarchical(sizes=[4, 4, 3], inner=ring, outer=ps, rails=true)"
    assert to_collective(tree) == tree.collective == text
    assert [len(group) for group in tree.groups()] == [4, 4, 3]
    COLLECTIVES.build(text).check(11)


def test_three_levels_are_nested_in_outer():
    levels = (Level(sizes=(2,) * 6, rails=False), Level(sizes=(3, 3), algorithm="ps", rails=False))
    tree = Hierarchy(order=numbered(12), levels=levels)
    COLLECTIVES.build(tree.collective).check(12)
    assert from_collective(tree.collective, tree.order).levels == levels
    assert tree.groups(1) == (numbered(12)[:6], numbered(12)[6:])


def test_a_quoted_outer_collective_is_read_too():
    text = (
        'hierarchical(sizes=[2, 2], inner=ring, outer="hierarchical(sizes=[1, 1], inner=ps, outer=ring)")'
    )
    assert [level.algorithm for level in from_collective(text, numbered(4)).levels] == ["ring", "ps"]


@pytest.mark.parametrize(
    "text", ["hierarchical(group=2)", "butterfly", "hierarchical(sizes=[2, 2], inner=direct)"]
)
def test_other_collectives_are_no_hierarchies(text):
    with pytest.raises(ConfigError):
        from_collective(text, numbered(4))


@pytest.mark.parametrize("sizes", [(2, 3), (4, 0), ()])
def test_levels_that_do_not_hold_all_members_are_refused(sizes):
    with pytest.raises(ConfigError, match="level 0 has groups of"):
        Hierarchy(order=numbered(4), levels=(Level(sizes=sizes),))


def test_a_node_that_is_there_twice_is_refused():
    with pytest.raises(ConfigError):
        Hierarchy(order=("a", "a"))


@pytest.mark.parametrize(
    ("count", "groups"), [(4, 2), (9, 3), (12, 3), (14, 4), (16, 4), (100, 10), (7, 3)]
)
def test_there_are_about_as_many_groups_as_the_square_root(count, groups):
    assert root_count(count) == groups


def test_square_roots_are_taken_until_no_ring_is_too_large():
    assert square_root_sizes(3) == []
    assert square_root_sizes(16) == [(4, 4, 4, 4)]
    # 256 = 16 groups of 16; each is 4 subgroups of 4; and the 16 groups are 4 groups of 4 too.
    assert square_root_sizes(256, 4) == [(4,) * 64, (4,) * 16, (4,) * 4]


def test_groups_that_are_given_are_divided_inside():
    # Of 9: 3 groups of 3. Of 4: stays one group, which is a group of one at the next level.
    assert nested_sizes([9, 4], 4) == [(3, 3, 3, 4), (3, 1)]
    with pytest.raises(ConfigError):
        nested_sizes([4], 1)


def test_groups_as_ranks_follow_the_ranks_of_the_nodes():
    tree = Hierarchy(order=("c", "a", "d", "b"), levels=(Level(sizes=(2, 2)),))
    assert tree.ranks(["a", "b", "c", "d"]) == ((2, 0), (3, 1))
    assert Hierarchy(order=("a", "b")).ranks(["a", "b"]) == ()


def test_the_flat_ring_by_site_is_the_first_candidate():
    found = candidate_hierarchies(two_sites(), [node.name for node in two_sites().nodes])
    assert found[0] == Hierarchy(order=("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3"))
    assert found[1].collective == "ps"
    texts = [one.collective for one in found if one.shape == "sites"]
    assert texts == [
        "hierarchical(sizes=[4, 4], inner=ring, outer=ring, rails=true)",
        "hierarchical(sizes=[4, 4], inner=ring, outer=ring, rails=false)",
        "hierarchical(sizes=[4, 4], inner=ring, outer=ps, rails=true)",
        "hierarchical(sizes=[4, 4], inner=ring, outer=ps, rails=false)",
        "hierarchical(sizes=[4, 4], inner=ps, outer=ring, rails=false)",
        "hierarchical(sizes=[4, 4], inner=ps, outer=ps, rails=false)",
    ]
    assert any(len(one.levels) == 2 for one in found)


def test_the_node_with_the_best_link_talks_for_its_group():
    topology = two_sites(a2=2 * GBIT, b3=3 * GBIT)
    found = candidate_hierarchies(topology, [node.name for node in topology.nodes])
    sites = next(one for one in found if one.shape == "sites")
    assert [group[0] for group in sites.groups()] == ["a2", "b3"]
    assert found[1].order[0] == "b3"


def test_sites_in_a_line_are_next_to_each_other():
    nodes = tuple(machine(f"{site}{at}", site) for site in "acb" for at in range(2))
    uplinks = tuple(Uplink(between=pair, bytes_per_s=GBIT) for pair in (("a", "b"), ("b", "c")))
    topology = Topology(nodes=nodes, uplinks=uplinks)
    assert candidate_hierarchies(topology, [node.name for node in nodes])[0].order == (
        *("a0", "a1", "b0", "b1"),
        *("c0", "c1"),
    )


def test_only_members_take_part():
    nodes = tuple(machine(f"{site}{at}", site) for site in "abc" for at in range(2))
    uplinks = tuple(Uplink(between=pair, bytes_per_s=GBIT / 10) for pair in (("a", "b"), ("b", "c")))
    topology = Topology(nodes=nodes, uplinks=uplinks)
    for one in candidate_hierarchies(topology, ["c1", "a0", "c0"]):
        assert sorted(one.order) == ["a0", "c0", "c1"]
    with pytest.raises(ConfigError, match="no node"):
        candidate_hierarchies(topology, [])


def test_levels_are_limited():
    topology = Topology(nodes=tuple(machine(name) for name in numbered(300)))
    for most_levels in (1, 2, 3, 4):
        found = candidate_hierarchies(topology, numbered(300), most_levels=most_levels)
        assert max(len(one.levels) for one in found) + 1 <= most_levels
        assert len(found) < 100
