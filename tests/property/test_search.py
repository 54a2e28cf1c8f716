"""The search: the best of everything for a few nodes, and rules that hold for any number of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.optimal_shares import most_share
from echelon.plan.predict.predict import predict
from echelon.plan.search import search
from echelon.plan.strategy import RunStrategy
from echelon.plan.topology import Node, Topology, Uplink
from echelon.plan.trials import Trials
from echelon.plan.ways import SearchSpace, ways_of
from simple_predictor import simple_prediction

GB = 1e9
EVERYTHING = SearchSpace(most_work=10**9)
BATCHES = st.integers(5, 40)


@st.composite
def topologies(draw, most=5):
    count = draw(st.integers(1, most))
    sites = draw(st.integers(1, 3))
    nodes = tuple(
        Node(
            name=f"n{index}",
            site=f"s{draw(st.integers(0, sites - 1))}",
            speed=draw(st.sampled_from([0.05, 0.25, 0.5, 1.0, 2.0])),
            memory_bytes=draw(st.sampled_from([2 * GB, 4 * GB, 64 * GB])),
            up_bytes_per_s=draw(st.sampled_from([1e6, 1e7, 1e9])),
            down_bytes_per_s=draw(st.sampled_from([1e6, 1e7, 1e9])),
            latency_s=draw(st.sampled_from([0.0, 1e-3, 5e-2])),
        )
        for index in range(count)
    )
    rate = draw(st.sampled_from([1e5, 1e7, 1e9]))
    uplinks = tuple(
        Uplink(between=(f"s{a}", f"s{b}"), bytes_per_s=rate, latency_s=1e-3)
        for a, b in itertools.combinations(range(sites), 2)
    )
    return Topology(nodes=nodes, uplinks=uplinks)


@st.composite
def jobs(draw, batch=BATCHES):
    size = draw(st.sampled_from([10_000, 1_000_000, 50_000_000]))
    return JobProfile(
        name="job",
        batch=draw(batch),
        cost=ComputeCost(fixed_s=draw(st.sampled_from([0.0, 0.05])), per_sample_s=0.02, apply_s=0.01),
        layers=(Layer(name="first", size_bytes=size), Layer(name="last", size_bytes=size, ready_at=0.4)),
        base_bytes=GB,
        sample_bytes=draw(st.sampled_from([0.0, 1e7, GB / 8])),
    )


def _fits(topology, job):
    return sum(most_share(job, node) for node in topology.nodes) >= job.batch


def _links(topology):
    """Ways depend on links and not on speeds, so that a faster node takes nothing away from them."""
    return replace(topology, nodes=tuple(replace(node, speed=1.0) for node in topology.nodes))


def _brute_force(topology, job, space):
    """Every set of nodes, every way, all whole shares."""
    best = float("inf")
    for size in range(1, len(topology.nodes) + 1):
        for members in itertools.combinations(topology.nodes, size):
            most = {node.name: most_share(job, node) for node in members}
            for way in ways_of(_links(topology), job, members, space):
                names = way.arrangement.nodes
                for shares in itertools.product(*(range(1, most[name] + 1) for name in names)):
                    if sum(shares) == job.batch:
                        strategy = RunStrategy(
                            nodes=names,
                            shares=shares,
                            groups=way.arrangement.groups,
                            collective=way.arrangement.collective,
                            codec=way.codec,
                            overlap=way.overlap,
                            factors=way.factors,
                        )
                        best = min(best, simple_prediction(topology, job, strategy).step_s)
    return best


@given(topologies(most=3), jobs(st.integers(3, 7)), st.booleans())
@settings(max_examples=30)
def test_for_a_few_nodes_no_set_way_or_shares_are_better(topology, job, exact):
    assume(_fits(topology, job))
    space = EVERYTHING
    result = search(topology, job, predict=simple_prediction, exact=exact, allowed=space)
    assert result.complete
    best = _brute_force(topology, job, space.exactly() if exact else space)
    assert result.best.step_s == pytest.approx(best, rel=1e-8)


@given(topologies(most=5), jobs())
@settings(max_examples=30)
def test_for_five_nodes_the_best_of_all_sets_and_ways_is_found(topology, job):
    assume(_fits(topology, job))
    result = search(topology, job, predict=simple_prediction, allowed=EVERYTHING)
    assert result.complete
    space = SearchSpace().exactly()
    trials = Trials(topology, job, simple_prediction)
    for size in range(1, len(topology.nodes) + 1):
        for members in itertools.combinations(topology.nodes, size):
            trials.take(members, ways_of(_links(topology), job, members, space))
    assert result.best.step_s <= trials.best_s * (1 + 1e-9)


@given(topologies(most=12), jobs(st.integers(12, 60)))
@settings(max_examples=30)
def test_a_plan_shares_the_whole_batch_within_memory_and_accounts_for_every_node(topology, job):
    assume(_fits(topology, job))
    result = search(topology, job, predict=simple_prediction)
    for candidate in result.candidates:
        strategy = candidate.strategy
        assert strategy.batch == job.batch
        assert len(set(strategy.nodes)) == len(strategy.nodes)
        for name, share in zip(strategy.nodes, strategy.shares, strict=True):
            assert job.memory_bytes(share) <= topology.node(name).memory_bytes
            assert share >= 1
        ranks = sorted(rank for group in strategy.groups for rank in group)
        assert ranks in ([], list(range(len(strategy.nodes))))
        assert (strategy.codec, strategy.sync) == ("none", "full")
    steps = [candidate.step_s for candidate in result.candidates]
    assert result.best == result.candidates[0]
    assert all(one <= other * (1 + 1e-8) for one, other in itertools.pairwise(steps))
    accounted = [*result.best.strategy.nodes, *(out.node for out in result.left_out)]
    assert sorted(accounted) == sorted(node.name for node in topology.nodes)
    assert all(out.why for out in result.left_out)


@given(topologies(most=5), jobs(), st.data())
@settings(max_examples=30)
def test_a_faster_node_never_makes_the_best_worse(topology, job, data):
    assume(_fits(topology, job))
    before = search(topology, job, predict=simple_prediction, allowed=EVERYTHING)
    index = data.draw(st.integers(0, len(topology.nodes) - 1))
    faster = replace(topology.nodes[index], speed=topology.nodes[index].speed * data.draw(st.floats(1, 20)))
    nodes = (*topology.nodes[:index], faster, *topology.nodes[index + 1 :])
    after = search(replace(topology, nodes=nodes), job, predict=simple_prediction, allowed=EVERYTHING)
    assert after.best.step_s <= before.best.step_s * (1 + 1e-8)


@given(topologies(most=14), jobs(st.integers(14, 60)), st.data())
@settings(max_examples=30)
def test_with_many_nodes_the_earlier_strategy_is_never_made_worse(topology, job, data):
    assume(_fits(topology, job))
    before = search(topology, job, predict=simple_prediction)
    index = data.draw(st.integers(0, len(topology.nodes) - 1))
    faster = replace(topology.nodes[index], speed=topology.nodes[index].speed * data.draw(st.floats(1, 20)))
    nodes = (*topology.nodes[:index], faster, *topology.nodes[index + 1 :])
    also = [before.best.strategy]
    after = search(replace(topology, nodes=nodes), job, predict=simple_prediction, also=also)
    assert after.best.step_s <= before.best.step_s * (1 + 1e-8)


@given(topologies(most=9), jobs())
@settings(max_examples=20)
def test_the_search_finds_the_same_again(topology, job):
    assume(_fits(topology, job))
    one, other = (search(topology, job, predict=simple_prediction) for _ in range(2))
    assert one == other


@given(topologies(most=4), jobs(), st.data())
@settings(max_examples=8)
def test_with_the_real_predictor_a_faster_node_never_makes_the_best_worse(topology, job, data):
    assume(_fits(topology, job))
    before = search(topology, job, predict=predict, allowed=EVERYTHING)
    assert before.complete
    index = data.draw(st.integers(0, len(topology.nodes) - 1))
    faster = replace(topology.nodes[index], speed=topology.nodes[index].speed * data.draw(st.floats(1, 20)))
    nodes = (*topology.nodes[:index], faster, *topology.nodes[index + 1 :])
    also = [before.best.strategy]
    after = search(replace(topology, nodes=nodes), job, predict=predict, allowed=EVERYTHING, also=also)
    assert after.best.step_s <= before.best.step_s * (1 + 1e-8)
