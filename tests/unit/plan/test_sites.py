"""Sites, links and uplinks are found in noisy measurements of networks that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.errors import ConfigError
from echelon.plan.measured import FlowsMeasured, PairMeasured
from echelon.plan.sites import find_sites, worthwhile_flows, worthwhile_pairs
from echelon.plan.topology import Node, Topology, Uplink
from networks import GBIT, Noisy, machine, partition

SEEDS = pytest.mark.parametrize("seed", range(4))


def two_sites(rate=GBIT / 10, latency_s=0.0, size=4, **more):
    """East and west, listed in turn."""
    nodes = [machine(f"{site}-{at}", site, **more) for at in range(size) for site in ("east", "west")]
    uplink = Uplink(between=("east", "west"), bytes_per_s=rate, latency_s=latency_s)
    return Topology(nodes=tuple(nodes), uplinks=(uplink,))


def changed(topology, name, **fields):
    nodes = tuple(replace(node, **fields) if node.name == name else node for node in topology.nodes)
    return replace(topology, nodes=nodes)


@SEEDS
def test_two_sites_in_mixed_order_and_their_shared_uplink_are_found(seed):
    real = two_sites()
    found = Noisy(real, seed=seed).find()
    assert partition(found.topology) == partition(real)
    assert found.topology.sites == ("east", "west")
    (uplink,) = found.topology.uplinks
    assert uplink.bytes_per_s == pytest.approx(GBIT / 10, rel=0.1)
    assert all(node.up_bytes_per_s == pytest.approx(GBIT, rel=0.1) for node in found.topology.nodes)
    assert "east-0..3 and west-0..3 are two sites: inside 12" in found.reasons[0]
    assert "shared" in found.reasons[0]


@SEEDS
def test_noise_of_a_fifth_does_not_matter(seed):
    real = two_sites(rate=GBIT / 3)
    assert partition(Noisy(real, noise=0.2, seed=seed).find().topology) == partition(real)


@SEEDS
def test_equal_links_everywhere_are_one_site(seed):
    real = Topology(nodes=tuple(machine(f"n{at}") for at in range(8)))
    found = Noisy(real, noise=0.2, seed=seed).find()
    assert found.topology.sites == ("main",)
    assert found.topology.uplinks == ()
    assert found.reasons[0].startswith("n0..7 are on one network")


@SEEDS
def test_a_slow_node_is_not_a_site(seed):
    nodes = [machine(f"n{at}", rate=GBIT / 10 if at == 3 else GBIT) for at in range(8)]
    found = Noisy(Topology(nodes=tuple(nodes)), seed=seed).find()
    assert found.topology.sites == ("main",)
    assert found.topology.node("n3").up_bytes_per_s == pytest.approx(GBIT / 10, rel=0.1)
    assert any("n3 sends at 1" in reason for reason in found.reasons)


@SEEDS
def test_a_link_that_is_slow_one_way_stays_so(seed):
    real = changed(two_sites(), "west-1", up_bytes_per_s=GBIT / 4)
    found = Noisy(real, seed=seed).find().topology
    assert partition(found) == partition(real)
    assert found.node("west-1").up_bytes_per_s == pytest.approx(GBIT / 4, rel=0.1)
    assert found.node("west-1").down_bytes_per_s == pytest.approx(GBIT, rel=0.1)


@SEEDS
def test_latency_alone_separates_sites(seed):
    real = two_sites(rate=GBIT, latency_s=5e-3)
    found = Noisy(real, seed=seed).find(rounds=0)
    assert partition(found.topology) == partition(real)
    assert found.topology.uplinks[0].latency_s == pytest.approx(5e-3, rel=0.1)
    assert "ms one way" in found.reasons[0]


@SEEDS
def test_differences_of_microseconds_do_not(seed):
    real = two_sites(rate=float("inf"), latency_s=2e-4)
    assert Noisy(real, seed=seed).find(rounds=0).topology.sites == ("main",)


@SEEDS
def test_nodes_with_slow_latency_of_their_own_are_not_sites(seed):
    nodes = [machine(f"n{at}", latency_s=1e-3 if at in {2, 5} else 1e-4) for at in range(8)]
    assert Noisy(Topology(nodes=tuple(nodes)), seed=seed).find().topology.sites == ("main",)


@SEEDS
def test_a_trunk_as_fast_as_a_link_is_found_by_flows_at_the_same_time(seed):
    real = two_sites(rate=GBIT)
    assert Noisy(real, seed=seed).find(rounds=0).topology.sites == ("main",)
    found = Noisy(real, seed=seed).find().topology
    assert partition(found) == partition(real)
    assert found.uplinks[0].bytes_per_s == pytest.approx(GBIT, rel=0.1)


@SEEDS
def test_a_node_slower_than_the_uplink_is_placed_by_flows(seed):
    slow = {"up_bytes_per_s": GBIT / 30, "down_bytes_per_s": GBIT / 30}
    real = changed(two_sites(), "west-2", **slow)
    alone = Noisy(real, seed=seed).find(rounds=0).topology
    assert frozenset({"west-2"}) in partition(alone)
    assert partition(Noisy(real, seed=seed).find().topology) == partition(real)


@SEEDS
def test_a_far_site_of_one_node_is_found(seed):
    real = two_sites()
    far = machine("far", "far")
    uplinks = [Uplink(between=(site, "far"), bytes_per_s=GBIT / 10, latency_s=8e-3) for site in real.sites]
    real = replace(real, nodes=(*real.nodes, far), uplinks=(*real.uplinks, *uplinks))
    assert partition(Noisy(real, seed=seed).find().topology) == partition(real)


def first_seed():
    """Four groups; the third and fourth are reached through the first."""
    groups = [("i5", 4), ("ryzen", 4), ("armv8", 3), ("armv7", 3)]
    nodes = tuple(machine(f"{name}-{at}", name) for name, count in groups for at in range(count))
    rates = [("ryzen", GBIT), ("armv8", GBIT / 20), ("armv7", GBIT / 20)]
    uplinks = tuple(Uplink(between=("i5", name), bytes_per_s=rate) for name, rate in rates)
    return Topology(nodes=nodes, uplinks=uplinks)


@SEEDS
def test_the_four_groups_of_the_first_seed_and_their_hub_are_found(seed):
    found = Noisy(first_seed(), seed=seed).find(rounds=2).topology
    assert partition(found) == partition(first_seed())
    assert {"armv8/armv7", "armv7/armv8"}.isdisjoint(uplink.name for uplink in found.uplinks)
    rates = {uplink.name: uplink.bytes_per_s for uplink in found.uplinks}
    assert rates["i5/ryzen"] == pytest.approx(GBIT, rel=0.15)
    assert rates["i5/armv8"] == pytest.approx(GBIT / 20, rel=0.15)


@SEEDS
def test_a_sample_of_pairs_is_enough(seed):
    """Each node with six others, both ways; 40 nodes in two sites."""
    real = two_sites(size=20)
    noisy = Noisy(real, seed=seed)
    names = [node.name for node in real.nodes]
    near = {name: noisy.draw.sample([other for other in names if other != name], 6) for name in names}
    pairs = [
        pair
        for pair in noisy.pairs()
        if pair.receiver in near[pair.sender] or pair.sender in near[pair.receiver]
    ]
    assert len(pairs) < 500
    assert partition(find_sites(pairs, nodes=real.nodes).topology) == partition(real)


@SEEDS
def test_nodes_that_met_nobody_of_their_site_are_measured_again(seed):
    """Each node with three others at random: 60 nodes in three sites."""
    nodes = tuple(machine(f"n{at}", f"s{at % 3}") for at in range(60))
    between = [("s0", "s1"), ("s0", "s2"), ("s1", "s2")]
    uplinks = tuple(Uplink(between=pair, bytes_per_s=GBIT / 10) for pair in between)
    noisy = Noisy(Topology(nodes=nodes, uplinks=uplinks), seed=seed)
    names = [node.name for node in nodes]
    every = {(pair.sender, pair.receiver): pair for pair in noisy.pairs()}
    chosen = set()
    for name in names:
        for other in noisy.draw.sample([other for other in names if other != name], 3):
            chosen |= {(name, other), (other, name)}
    for _ in range(3):
        chosen |= set(worthwhile_pairs(names, [every[flow] for flow in chosen]))
    found = find_sites([every[flow] for flow in sorted(chosen)], nodes=nodes).topology
    assert partition(found) == partition(noisy.topology)
    assert len(chosen) < len(every) / 3


@SEEDS
def test_a_few_nodes_that_all_others_measure_with_are_a_good_sample(seed):
    """Six of 90 nodes in five sites: some site has none of the six, and is found in the next round."""
    nodes = tuple(machine(f"n{at}", f"s{at % 5}") for at in range(90))
    between = [(f"s{at}", f"s{other}") for at in range(5) for other in range(at)]
    uplinks = tuple(Uplink(between=pair, bytes_per_s=GBIT / 10) for pair in between)
    noisy = Noisy(Topology(nodes=nodes, uplinks=uplinks), seed=seed)
    names = [node.name for node in nodes]
    every = {(pair.sender, pair.receiver): pair for pair in noisy.pairs()}
    chosen = {flow for flow in every if {"n0", "n1", "n5", "n6", "n10", "n12"} & set(flow)}
    for _ in range(3):
        chosen |= set(worthwhile_pairs(names, [every[flow] for flow in chosen]))
    found = find_sites([every[flow] for flow in sorted(chosen)], nodes=nodes).topology
    assert partition(found) == partition(noisy.topology)
    assert worthwhile_pairs(names, [every[flow] for flow in chosen]) == []
    assert len(chosen) < len(every) / 4


def test_what_is_known_of_nodes_is_kept():
    nodes = [Node(name=name, speed=speed, cores=speed) for name, speed in (("b", 0.5), ("a", 2.0))]
    pairs = [PairMeasured(sender="a", receiver="b", latency_s=1e-4, bytes_per_s=5e6)]
    found = find_sites(pairs, nodes=nodes).topology
    assert [(node.name, node.speed, node.site) for node in found.nodes] == [
        ("b", 0.5, "main"),
        ("a", 2.0, "main"),
    ]
    assert found.node("a").up_bytes_per_s == 5e6


def test_one_node_is_one_site():
    assert find_sites([], nodes=[Node(name="a", site="x")]).topology.sites == ("main",)


def test_a_node_that_was_not_measured_is_named():
    pairs = [PairMeasured(sender="a", receiver="b", latency_s=0, bytes_per_s=1)]
    with pytest.raises(ConfigError, match="nothing was measured with c"):
        find_sites(pairs, nodes=[Node(name=name) for name in "abc"])


def test_nodes_with_no_measurement_between_are_named():
    pairs = [PairMeasured(sender=a, receiver=b, latency_s=0, bytes_per_s=1) for a, b in ("ab", "cd")]
    with pytest.raises(ConfigError, match="nothing was measured between a and c"):
        find_sites(pairs)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_link_without_a_rate_is_refused(rate):
    with pytest.raises(ConfigError, match="a rate of"):
        PairMeasured(sender="a", receiver="b", latency_s=0, bytes_per_s=rate)
    with pytest.raises(ConfigError, match="a rate of"):
        FlowsMeasured(flows=(("a", "b"),), bytes_per_s=(rate,))


def test_rates_and_flows_must_be_as_many():
    with pytest.raises(ConfigError, match="1 flows have 2 rates"):
        FlowsMeasured(flows=(("a", "b"),), bytes_per_s=(1, 2))


def test_flows_between_sites_are_asked_for_first_and_never_twice():
    noisy = Noisy(two_sites())
    names = [node.name for node in noisy.topology.nodes]
    pairs = noisy.pairs()
    sets = worthwhile_flows(names, pairs)
    assert sets[0] == tuple((f"east-{at}", f"west-{at}") for at in range(4))
    assert len(sets) <= 12
    assert all(len({sender for sender, _ in one}) == len(one) for one in sets)
    again = worthwhile_flows(names, pairs, noisy.flows(sets))
    assert not set(again) & set(sets)


@pytest.mark.parametrize("names", [(), ("a",), ("a", "b")])
def test_nothing_is_asked_for_where_nothing_can_be_shared(names):
    assert worthwhile_flows(names, []) == []
