"""Sites are found where they differ by a factor of 2 in rate or latency, with 10 % noise."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.plan.fair import fair_rates
from echelon.plan.sites import worthwhile_flows
from echelon.plan.topology import Topology, Uplink
from networks import GBIT, Noisy, machine, partition


@st.composite
def networks(draw):
    """One to four sites in mixed order, joined in a line or each with each; sites differ by at least 2."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    rates = st.floats(0.5, 2).map(lambda part: part * GBIT)
    nodes = [
        machine(
            f"n{site}{at}",
            f"s{site}",
            up_bytes_per_s=draw(rates),
            down_bytes_per_s=draw(rates),
            latency_s=draw(st.floats(1e-4, 3e-4)),
        )
        for site, size in enumerate(sizes)
        for at in range(size)
    ]
    slowest = min(min(node.up_bytes_per_s, node.down_bytes_per_s) for node in nodes)
    latest = max(node.latency_s for node in nodes)
    sites = [f"s{site}" for site in range(len(sizes))]
    line, all_by_rate = draw(st.booleans()), draw(st.booleans())
    uplinks = []
    for pair in pairwise(sites) if line else combinations(sites, 2):
        # In a mesh all differ in the same way: no detour has less latency than the direct line.
        by_rate = draw(st.booleans()) if line else all_by_rate
        # Below half a millisecond (and its noise) latency does not count.
        latency_s = max(2 * latest * draw(st.floats(1, 50 if line else 1.5)), 8e-4)
        uplinks.append(
            Uplink(
                between=pair,
                bytes_per_s=slowest * draw(st.floats(0.01, 0.5)) if by_rate else 2 * GBIT,
                latency_s=0.0 if by_rate else latency_s,
            )
        )
    return Topology(nodes=tuple(draw(st.permutations(nodes))), uplinks=tuple(uplinks))


@settings(max_examples=60)
@given(networks(), st.integers(0, 1000))
def test_the_sites_that_are_found_are_the_real_ones(real, seed):
    found = Noisy(real, seed=seed).find()
    assert partition(found.topology) == partition(real), found.reasons


@settings(max_examples=60)
@given(networks(), st.integers(0, 1000))
def test_pairs_alone_find_them_too(real, seed):
    found = Noisy(real, seed=seed).find(rounds=0)
    assert partition(found.topology) == partition(real), found.reasons


@settings(max_examples=60)
@given(networks())
def test_without_noise_all_rates_are_found(real):
    found = Noisy(real, noise=0.0).find().topology
    for one in real.nodes:
        for other in real.nodes:
            if one is not other:
                rate = found.bytes_per_s(found.node(one.name), found.node(other.name))
                assert rate == pytest.approx(real.bytes_per_s(one, other), rel=0.35)


@settings(max_examples=60)
@given(networks(), st.data())
def test_fair_rates_fill_links_and_no_more(real, data):
    names = [node.name for node in real.nodes]
    flow = st.tuples(st.sampled_from(names), st.sampled_from(names)).filter(lambda one: one[0] != one[1])
    flows = data.draw(st.lists(flow, min_size=1, max_size=10))
    rates = fair_rates(real, flows)
    for node in real.nodes:
        sent = sum(rate for (sender, _), rate in zip(flows, rates, strict=True) if sender == node.name)
        assert sent <= node.up_bytes_per_s * (1 + 1e-9)
    for flow, rate in zip(flows, rates, strict=True):
        most = real.bytes_per_s(real.node(flow[0]), real.node(flow[1]))
        assert most / len(flows) * (1 - 1e-9) <= rate <= most * (1 + 1e-9)


@settings(max_examples=60)
@given(networks())
def test_flows_that_are_worthwhile_are_few_and_between_nodes_that_exist(real):
    names = [node.name for node in real.nodes]
    sets = worthwhile_flows(names, Noisy(real).pairs())
    assert len(sets) <= 12
    assert len(set(sets)) == len(sets)
    for flows in sets:
        assert len(flows) > 1
        assert all(sender != receiver and {sender, receiver} <= set(names) for sender, receiver in flows)
