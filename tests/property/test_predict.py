"""Predictions: what must hold for any cluster, job and strategy."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.comm.schedule.collective import COLLECTIVES
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.predict.engine_costs import EngineCosts, burst_s
from echelon.plan.predict.flows import phases_of
from echelon.plan.predict.network import SharedLinks
from echelon.plan.predict.predict import predict
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Node, Topology, Uplink

FLAT = ("ring", "direct", "halving-doubling", "butterfly", "binary-blocks", "ps(servers=1)")


@st.composite
def jobs(draw: st.DrawFn) -> JobProfile:
    """Small models: packed into the same buckets on any link."""
    count = draw(st.integers(1, 4))
    ready = sorted(draw(st.lists(st.floats(0.4, 1.0), min_size=count, max_size=count)), reverse=True)
    return JobProfile(
        name="drawn",
        batch=64,
        cost=ComputeCost(
            fixed_s=draw(st.floats(0, 1e-2)), per_sample_s=draw(st.floats(1e-6, 1e-3)), apply_s=1e-4
        ),
        layers=tuple(
            Layer(name=f"l{at}", size_bytes=4 * draw(st.integers(1, 60_000)), ready_at=ready[at])
            for at in range(count)
        ),
        exchanges=draw(st.sampled_from((0, 0, 4))),
    )


@st.composite
def clusters(draw: st.DrawFn, least: int = 2) -> Topology:
    """Two sites at most."""
    nodes = []
    for at in range(draw(st.integers(least, 6))):
        speed = draw(st.sampled_from((0.1, 0.25, 0.5, 1.0, 2.0)))
        nodes.append(
            Node(
                name=f"n{at}",
                site=draw(st.sampled_from(("east", "west"))),
                speed=speed,
                cores=draw(st.sampled_from((min(speed, 1.0), 1.0, 2.0))),
                up_bytes_per_s=draw(st.sampled_from((6e6, 2.5e7, 1.2e8))),
                down_bytes_per_s=draw(st.sampled_from((6e6, 2.5e7, 1.2e8))),
                latency_s=draw(st.sampled_from((0.0, 1e-3))),
            )
        )
    uplink = Uplink(between=("east", "west"), bytes_per_s=draw(st.sampled_from((2e6, 1e7))), latency_s=1e-3)
    return Topology(nodes=tuple(nodes), uplinks=(uplink,))


@st.composite
def settings(draw: st.DrawFn) -> tuple[Topology, JobProfile, RunStrategy]:
    """A cluster, a job and a strategy."""
    topology = draw(clusters())
    size = len(topology.nodes)
    strategy = RunStrategy(
        nodes=tuple(node.name for node in topology.nodes),
        shares=tuple(draw(st.integers(1, 40)) for _ in range(size)),
        collective=draw(st.sampled_from((*FLAT, "hierarchical"))),
        overlap=draw(st.sampled_from(("backward", "step"))),
    )
    return topology, draw(jobs()), strategy


def changed(topology: Topology, rank: int, **fields: float) -> Topology:
    nodes = list(topology.nodes)
    nodes[rank] = replace(nodes[rank], **fields)
    return replace(topology, nodes=tuple(nodes))


@given(settings(), st.data())
def test_a_faster_node_or_link_never_makes_a_step_longer(setting, data):
    topology, job, strategy = setting
    rank = data.draw(st.integers(0, len(topology.nodes) - 1))
    node = topology.nodes[rank]
    flat = EngineCosts(byte_s=((1.0, 1e-9),))  # what a byte costs may grow with the rate, as was measured
    before_s = predict(topology, job, strategy, flat).step_s
    # With overlap="step" the simulation is cut off before steps are exactly alike.
    nearly = 1.02 if strategy.overlap == "step" else 1 + 1e-9
    for faster in (
        changed(topology, rank, speed=2 * node.speed),
        changed(topology, rank, up_bytes_per_s=3 * node.up_bytes_per_s),
        changed(topology, rank, down_bytes_per_s=3 * node.down_bytes_per_s),
        replace(topology, uplinks=(replace(topology.uplinks[0], bytes_per_s=1e9),)),
    ):
        assert predict(faster, job, strategy, flat).step_s <= before_s * nearly


@given(settings())
def test_a_step_is_no_shorter_than_computing_and_than_the_busiest_link(setting):
    topology, job, strategy = setting
    found = predict(topology, job, strategy)
    assert found.step_s >= max(found.compute_s)
    for node in topology.nodes:
        both_ways = node.up_bytes_per_s + node.down_bytes_per_s
        assert found.step_s >= found.link_bytes[node.name] / both_ways * (1 - 1e-9)
    assert found.step_s >= found.link_bytes["east/west"] / (2 * topology.uplinks[0].bytes_per_s) * (
        1 - 1e-9
    )
    assert 0 < found.efficiency <= 1 + 1e-9
    assert min(found.wait_s) >= 0
    assert found.exposed_s >= 0


@given(st.sampled_from((*FLAT, "hierarchical", "hierarchical(group=2)")), st.integers(2, 9), st.data())
def test_flows_are_what_the_schedules_send(text, size, data):
    collective = COLLECTIVES.build(text)
    length = 720720
    sent = np.zeros((size, size))
    for rank in range(size):
        for step in collective.schedule(rank, size, length):
            for move in step.sends:
                sent[rank, move.peer] += move.length / length
    found = np.zeros((size, size))
    for phase in phases_of(text, size):
        np.add.at(found, (phase.senders, phase.receivers), phase.repeats * phase.fractions)
    assert np.allclose(found, sent, atol=1e-4)


@given(clusters(), st.sampled_from((*FLAT, "hierarchical")))
def test_bytes_through_links_are_those_of_the_schedules(topology, text):
    size, length = len(topology.nodes), 720720
    collective = COLLECTIVES.build(text)
    across, through = 0.0, [0.0] * size
    for rank in range(size):
        for step in collective.schedule(rank, size, length):
            for move in step.sends:
                across += move.length * (topology.nodes[rank].site != topology.nodes[move.peer].site)
                through[rank] += move.length
                through[move.peer] += move.length
    job = JobProfile(
        name="one",
        batch=size,
        cost=ComputeCost(fixed_s=0.0, per_sample_s=1e-3),
        layers=(Layer(name="w", size_bytes=4 * (length - 1)),),
    )
    names = tuple(node.name for node in topology.nodes)
    found = predict(topology, job, RunStrategy(nodes=names, shares=(1,) * size, collective=text)).link_bytes
    assert found["east/west"] == pytest.approx(4 * across, rel=1e-3, abs=1e3)
    assert [found[name] for name in names] == pytest.approx([4 * one for one in through], rel=1e-3, abs=1e3)


@given(clusters(least=1), jobs())
def test_one_worker_does_not_communicate(topology, job):
    found = predict(topology, job, RunStrategy(nodes=("n0",), shares=(8,)))
    assert found.exposed_s == 0
    assert not any(found.link_bytes.values())
    cost = job.cost_on(topology.nodes[0])
    assert found.step_s == pytest.approx(cost.at(8) + cost.apply_s, rel=1e-6)


@given(settings(), st.randoms())
def test_the_order_of_equal_nodes_within_a_site_does_not_matter(setting, random):
    topology, job, strategy = setting
    shape = {"east": 0.5, "west": 1.0}
    nodes = tuple(
        Node(
            name=node.name,
            site=node.site,
            speed=shape[node.site],
            cores=shape[node.site],
            up_bytes_per_s=1e7,
        )
        for node in topology.nodes
    )
    topology = replace(topology, nodes=nodes)
    share = {"east": 4, "west": 8}
    names = list(strategy.nodes)

    def with_order(order: list[str]) -> Prediction:
        shares = tuple(share[topology.node(name).site] for name in order)
        return predict(topology, job, replace(strategy, nodes=tuple(order), shares=shares))

    by_site: dict[str, list[str]] = {}
    for node in nodes:
        by_site.setdefault(node.site, []).append(node.name)
    for members in by_site.values():
        random.shuffle(members)
    mixed = [by_site[topology.node(name).site].pop() for name in names]
    assert with_order(mixed).step_s == pytest.approx(with_order(names).step_s)


@given(st.floats(0, 1), st.floats(0.05, 1), st.floats(0.005, 0.1))
def test_a_burst_takes_its_cpu_time_at_least_and_its_share_of_the_cpu_at_most(cpu_s, quota, period_s):
    took_s = burst_s(cpu_s, quota, period_s)
    assert cpu_s <= took_s <= max(cpu_s, cpu_s / quota) * (1 + 1e-9)
    assert burst_s(cpu_s * 2, quota, period_s) >= took_s


@given(st.lists(st.integers(2, 40), min_size=2, max_size=5, unique=True))
def test_a_ring_of_more_workers_costs_no_fewer_bytes_per_worker(sizes):
    found = []
    for size in sorted(sizes):
        nodes = tuple(Node(name=f"n{at}", up_bytes_per_s=1e8, down_bytes_per_s=1e8) for at in range(size))
        network = SharedLinks(Topology(nodes=nodes), [node.name for node in nodes], EngineCosts())
        cost = network.cost("ring", 1e6)
        assert cost.s_per_byte == pytest.approx(2 * (size - 1) / size / 1e8)
        assert cost.steps == 2 * (size - 1)
        found.append(cost.s_per_byte)
    assert all(one <= other for one, other in pairwise(found))
    assert math.isfinite(sum(found))
