"""Who forms a group: by transfer cost and compute power, by equal power, at random."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.errors import ConfigError
from echelon.plan.equal_power import equal_power_groups
from echelon.plan.grouping import (
    form_groups,
    limit_size,
    order_limits,
    random_groups,
    separate,
    separate_by_power,
    separate_by_transfer,
)
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.topology import Node, Topology, Uplink
from networks import GBIT, machine


def two_sites(rate=GBIT / 10, latency_s=0.0):
    """In turn, so that every predecessor is in the other site."""
    nodes = tuple(machine(f"{site}{at}", site) for at in range(4) for site in "ab")
    return Topology(
        nodes=nodes, uplinks=(Uplink(between=("a", "b"), bytes_per_s=rate, latency_s=latency_s),)
    )


def with_speeds(topology, **speeds):
    nodes = tuple(replace(node, speed=speeds.get(node.name, node.speed)) for node in topology.nodes)
    return replace(topology, nodes=nodes)


def first_seed():
    groups = [("i5", 4, 0.2), ("ryzen", 4, 0.18), ("armv8", 3, 0.02), ("armv7", 3, 0.016)]
    nodes = tuple(
        Node(name=f"{name}-{at}", site=name, speed=speed, up_bytes_per_s=GBIT, down_bytes_per_s=GBIT)
        for name, count, speed in groups
        for at in range(count)
    )
    rates = [("ryzen", 10 * GBIT), ("armv8", GBIT / 20), ("armv7", GBIT / 20)]
    return Topology(
        nodes=nodes, uplinks=tuple(Uplink(between=("i5", name), bytes_per_s=rate) for name, rate in rates)
    )


def test_sites_in_mixed_order_are_separated_by_transfer_cost():
    assert separate_by_transfer(two_sites()) == (("a0", "a1", "a2", "a3"), ("b0", "b1", "b2", "b3"))


def test_latency_is_a_transfer_cost():
    assert len(separate_by_transfer(two_sites(rate=10 * GBIT, latency_s=0.1))) == 2


def test_an_uplink_that_all_members_share_costs_as_many_times_more():
    """As fast as a node's link, but for four: 4 times the cost, which is another order of magnitude."""
    assert len(separate_by_transfer(two_sites(rate=GBIT))) == 2
    assert len(separate_by_transfer(two_sites(rate=2 * GBIT))) == 1


def test_a_node_with_a_slow_link_is_a_group_of_its_own():
    nodes = [machine(f"n{at}", rate=GBIT / 20 if at == 1 else GBIT) for at in range(4)]
    assert separate_by_transfer(Topology(nodes=tuple(nodes))) == (("n0", "n2", "n3"), ("n1",))


def test_two_nodes_with_slow_links_are_of_one_order():
    nodes = [machine(f"n{at}", rate=GBIT / 20 if at in {1, 3} else GBIT) for at in range(5)]
    assert separate_by_transfer(Topology(nodes=tuple(nodes))) == (("n0", "n2", "n4"), ("n1", "n3"))


def test_magnitudes_of_power_are_separated_fastest_first():
    speeds = {"a": 0.016, "b": 0.2, "c": 0.02, "d": 0.18}
    assert separate_by_power("abcd", speeds) == (("b", "d"), ("a", "c"))


@pytest.mark.parametrize(
    ("values", "orders"),
    [
        ([1.0], 1),
        ([0.99, 1.01], 1),  # a power of ten between them does not matter
        ([0.8, 0.4, 0.2, 0.1], 1),  # less than ten times, in small steps
        ([1.0, 3.0], 1),
        ([1.0, 3.3], 2),
        ([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 2),
        ([1.0, 10.0, 100.0], 3),
        ([5.0, 5.0, 5.0], 1),
    ],
)
def test_orders_of_magnitude(values, orders):
    assert len(order_limits(values)) + 1 == orders


def test_the_first_seeds_cluster_is_separated_as_in_its_experiment():
    """Groups 1 and 2 are alike; the connection from groups 3 and 4 is slow, and they are slower."""
    fast = tuple(f"{name}-{at}" for name in ("i5", "ryzen") for at in range(4))
    slow = [tuple(f"{name}-{at}" for at in range(3)) for name in ("armv8", "armv7")]
    assert separate(first_seed()) == (fast, *slow)


def test_sites_are_grouped_by_transfer_cost_then_by_power():
    grouping = form_groups(with_speeds(two_sites(), a1=0.05, a2=0.04))
    assert grouping.kind == "transfer and power"
    assert grouping.groups == (("a0", "a3"), ("a1", "a2"), ("b0", "b1", "b2", "b3"))
    assert "2 groups by transfer cost, 3 by order of magnitude" in grouping.reason


def test_measured_costs_of_a_job_come_before_speeds():
    job = JobProfile(
        name="job",
        batch=64,
        cost=ComputeCost(fixed_s=0.0, per_sample_s=1e-3),
        layers=(Layer(name="all", size_bytes=10**6),),
        costs={"b3": ComputeCost(fixed_s=0.0, per_sample_s=0.1)},
    )
    assert form_groups(two_sites(), job).groups[1:] == (("b0", "b1", "b2"), ("b3",))


def test_large_groups_are_cut_to_the_limit():
    grouping = form_groups(two_sites(), most=3)
    assert [len(group) for group in grouping.groups] == [2, 2, 2, 2]
    assert "4 with at most 3 nodes" in grouping.reason


def test_unequal_nodes_on_one_network_form_groups_of_equal_power():
    speeds = [8, 1, 1, 1, 1, 4, 4, 4]
    topology = Topology(nodes=tuple(Node(name=f"n{at}", speed=speed) for at, speed in enumerate(speeds)))
    grouping = form_groups(topology, most=5)
    assert grouping.kind == "equal power"
    totals = [sum(topology.node(name).speed for name in group) for group in grouping.groups]
    assert totals == [12, 12]
    assert "factor of 8.0" in grouping.reason


def test_groups_exchange_nodes_until_they_are_equal():
    """From the fastest on, 3 + 2 + 2 and 3 + 2; exchanging a 3 for a 2 gives 6 and 6."""
    groups = equal_power_groups("abcde", [3, 3, 2, 2, 2], 2)
    assert set(groups) == {("a", "b"), ("c", "d", "e")}


def test_equal_nodes_on_one_network_form_groups_at_random():
    topology = Topology(nodes=tuple(Node(name=f"n{at}") for at in range(12)))
    grouping = form_groups(topology, most=4, seed=3)
    assert grouping.kind == "random"
    assert [len(group) for group in grouping.groups] == [4, 4, 4]
    assert form_groups(topology, most=4, seed=3) == grouping
    assert form_groups(topology, most=4, seed=4).groups != grouping.groups
    assert "seed 3" in grouping.reason


@pytest.mark.parametrize("most", [None, 8])
def test_without_a_reason_there_is_one_group(most):
    topology = Topology(nodes=tuple(Node(name=f"n{at}", speed=at + 1) for at in range(8)))
    grouping = form_groups(topology, most=most)
    assert grouping.kind == "none"
    assert len(grouping.groups) == 1


def test_one_node_is_one_group():
    assert form_groups(Topology(nodes=(Node(name="a"),))).groups == (("a",),)


def test_groups_become_ranks_of_those_that_take_part():
    grouping = form_groups(two_sites())
    assert grouping.ranks(["b1", "a0", "b0", "a3"]) == ((1, 3), (2, 0))


def test_the_mean_power_of_random_groups_varies_less_the_larger_they_are():
    speeds = {f"n{at}": 1.0 + at % 7 for at in range(896)}

    def variance(size):
        groups = random_groups(list(speeds), len(speeds) // size, seed=1)
        means = [sum(speeds[name] for name in group) / len(group) for group in groups]
        return sum((mean - 4) ** 2 for mean in means) / len(means)

    assert variance(64) < variance(16) < variance(4) / 2


def test_limits_without_speeds_keep_the_order():
    assert limit_size([("a", "b", "c", "d", "e"), ("f",)], 2) == (("a",), ("b", "c"), ("d", "e"), ("f",))
    assert limit_size([("a", "b")], None) == (("a", "b"),)


@pytest.mark.parametrize(("count", "limits"), [(0, {}), (4, {}), (2, {"most": 1}), (2, {"least": 2})])
def test_impossible_numbers_of_groups_are_refused(count, limits):
    with pytest.raises(ConfigError, match="3 nodes cannot form"):
        equal_power_groups("abc", [1, 1, 1], count, **limits)
