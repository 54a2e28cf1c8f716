"""Situations in which the best plan is known, and what the search says of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.errors import PlanError
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.make import plan_of, strategy_text
from echelon.plan.optimal_shares import best_shares
from echelon.plan.plan import Plan, PlanRequest
from echelon.plan.search import search
from echelon.plan.servers import best_servers
from echelon.plan.strategy import RunStrategy
from echelon.plan.topology import Node, Topology, Uplink
from echelon.plan.ways import SearchSpace, ways_of
from simple_predictor import simple_prediction

JOB = JobProfile(
    name="job",
    batch=96,
    cost=ComputeCost(fixed_s=0.0, per_sample_s=0.01),
    layers=(Layer(name="first", size_bytes=500_000), Layer(name="last", size_bytes=500_000, ready_at=0.5)),
)


def _nodes(speeds, site="main", rate=1e9, **more):
    return tuple(
        Node(
            name=f"{site}-{index}",
            site=site,
            speed=speed,
            up_bytes_per_s=rate,
            down_bytes_per_s=rate,
            **more,
        )
        for index, speed in enumerate(speeds)
    )


def _search(nodes, job=JOB, uplinks=(), **more):
    return search(Topology(nodes=nodes, uplinks=uplinks), job, predict=simple_prediction, **more)


def test_all_nodes_compute_with_shares_by_speed_on_fast_links():
    result = _search(_nodes([0.8, 0.4, 0.2, 0.1]))
    best = result.best.strategy
    assert best.nodes == ("main-0", "main-1", "main-2", "main-3")
    assert max(share / speed for share, speed in zip(best.shares, (8, 4, 2, 1), strict=True)) == 6.5
    assert result.left_out == ()
    assert result.kind.bound == "compute"
    assert result.complete


def test_a_node_that_costs_more_than_it_brings_is_left_out_with_the_difference():
    slow = Node(name="far", speed=0.1, up_bytes_per_s=1e5, down_bytes_per_s=1e5)
    result = _search((*_nodes([1, 1]), slow))
    assert result.best.strategy.nodes == ("main-0", "main-1")
    (left,) = result.left_out
    assert left.node == "far"
    assert left.why.startswith("it costs more than it brings: with it a step takes 1")
    assert "instead of" in left.why


def test_a_whole_site_behind_a_thin_uplink_is_left_out():
    nodes = (*_nodes([1, 1, 1, 1], "east"), *_nodes([1, 1, 1, 1], "west"))
    uplinks = (Uplink(between=("east", "west"), bytes_per_s=1e5),)
    result = _search(nodes, uplinks=uplinks)
    assert {name[:4] for name in result.best.strategy.nodes} == {"east"}
    assert [out.node for out in result.left_out] == [f"west-{index}" for index in range(4)]
    assert len({out.why for out in result.left_out}) == 1  # nodes that are alike have the same reason


def test_sites_with_a_slower_uplink_sum_inside_first():
    nodes = (*_nodes([1, 1, 1], "east"), *_nodes([1, 1, 1], "west"))
    mixed = tuple(nodes[index] for index in (0, 3, 1, 4, 2, 5))
    uplinks = (Uplink(between=("east", "west"), bytes_per_s=2e7, latency_s=2e-3),)
    best = _search(mixed, uplinks=uplinks).best.strategy
    assert best.groups == ((0, 1, 2), (3, 4, 5))
    assert best.nodes[:3] == ("east-0", "east-1", "east-2")
    assert best.collective.startswith("hierarchical(sizes=[3, 3]")


def test_unreachable_nodes_are_named_and_planned_without():
    broken = Node(name="dead", up_bytes_per_s=0.0)
    lost = Node(name="lost", site="moon")
    result = _search((*_nodes([1, 1]), broken, lost))
    assert result.best.strategy.nodes == ("main-0", "main-1")
    reasons = {out.node: out.why for out in result.left_out}
    assert reasons == {
        "dead": "its link carries nothing",
        "lost": "no link with bandwidth leads from main to its site moon",
    }


def test_a_strong_node_without_a_link_trains_alone():
    strong = Node(name="strong", speed=50.0, up_bytes_per_s=0.0)
    result = _search((*_nodes([1, 1]), strong))
    assert result.best.strategy.nodes == ("strong",)
    assert [out.node for out in result.left_out] == ["main-0", "main-1"]


def test_a_weaker_part_that_holds_the_batch_is_used():
    job = replace(JOB, base_bytes=1.0, sample_bytes=1.0)
    strong = Node(name="strong", speed=50.0, up_bytes_per_s=0.0, memory_bytes=9.0)
    result = _search((strong, *_nodes([1, 1])), job)
    assert result.best.strategy.nodes == ("main-0", "main-1")
    assert {out.node: out.why for out in result.left_out} == {"strong": "it cannot reach main-0"}


def test_a_batch_with_fewer_samples_than_nodes_uses_the_fastest():
    result = _search(_nodes([0.1, 1, 0.2, 1]), replace(JOB, batch=2))
    assert result.best.strategy.nodes == ("main-1", "main-3")
    assert "no sample left" in result.left_out[0].why


def test_a_limit_of_workers_is_kept():
    result = _search(_nodes([1] * 8), most_workers=3)
    assert max(len(candidate.strategy.nodes) for candidate in result.candidates) == 3
    assert "at most 3 workers were asked for" in result.left_out[0].why


def test_a_job_that_too_few_workers_can_hold_is_refused():
    job = replace(JOB, base_bytes=1.0, sample_bytes=1.0)
    with pytest.raises(PlanError, match="1 workers cannot hold a batch of 96"):
        _search(_nodes([1, 1], memory_bytes=60.0), job, most_workers=1)
    with pytest.raises(PlanError, match="a batch of 96 does not fit: main-0 holds 9, main-1 holds 9"):
        _search(_nodes([1, 1], memory_bytes=10.0), job)


def test_nothing_that_changes_results_is_chosen_unless_allowed():
    nodes = _nodes([1, 1, 1], rate=1e6)
    exact = _search(nodes)
    assert {candidate.strategy.codec for candidate in exact.candidates} == {"none"}
    inexact = _search(nodes, exact=False)
    assert inexact.best.strategy.codec != "none"
    assert inexact.best.step_s < exact.best.step_s
    fixed = _search(nodes, allowed=SearchSpace(codecs=("one-bit",)))
    assert fixed.best.strategy.codec == "one-bit"


def test_sites_can_use_a_codec_between_them_only():
    nodes = (*_nodes([1, 1], "east"), *_nodes([1, 1], "west"))
    uplinks = (Uplink(between=("east", "west"), bytes_per_s=1e6),)
    allowed = SearchSpace(codecs=("none", "one-bit"))
    tried = _search(nodes, uplinks=uplinks, exact=False, allowed=allowed).candidates
    between = [one.strategy for one in tried if one.strategy.codec == "between(one-bit)"]
    assert between
    assert all(strategy.groups for strategy in between)


def test_policies_with_servers_get_as_many_servers_as_the_cost_says():
    allowed = SearchSpace(syncs=(), served_syncs=("async",))
    best = _search(_nodes([1] * 4), allowed=allowed).best.strategy
    assert (best.sync, best.servers) == ("async", 4)


def test_a_policy_that_the_user_fixed_is_used_even_if_it_changes_results():
    tried = _search(_nodes([1] * 4), allowed=SearchSpace(syncs=("local(8)",))).candidates
    assert {one.strategy.sync for one in tried if len(one.strategy.nodes) > 1} == {"local(8)"}


@pytest.mark.parametrize(("workers", "servers"), [(2, 2), (8, 8), (32, 32)])
def test_servers_grow_with_workers_where_links_are_alike(workers, servers):
    nodes = _nodes([1] * workers, rate=1e6)
    assert best_servers(Topology(nodes=nodes), JOB, nodes) == servers


def test_a_node_with_a_much_better_link_is_server_enough():
    nodes = (*_nodes([1] * 8, rate=1e6), Node(name="hub", up_bytes_per_s=1e8, down_bytes_per_s=1e8))
    assert best_servers(Topology(nodes=nodes), JOB, nodes) == 1


def test_latency_limits_the_number_of_servers():
    nodes = _nodes([1] * 32, rate=1e8, latency_s=0.01)
    assert best_servers(Topology(nodes=nodes), JOB, nodes) < 8


def test_the_current_strategy_is_a_candidate_and_wins_if_nothing_is_better():
    nodes = _nodes([1] * 8)
    current = RunStrategy(nodes=("main-7",), shares=(96,))
    result = _search(
        nodes, also=[current, replace(current, shares=(95,)), replace(current, nodes=("gone",))]
    )
    tried = [candidate.strategy for candidate in result.candidates]
    assert current in tried
    assert all(strategy.batch == 96 for strategy in tried)
    assert "gone" not in {name for strategy in tried for name in strategy.nodes}


def test_shares_can_be_asked_for():
    nodes = _nodes([0.8, 0.4])
    equal = _search(nodes, allowed=SearchSpace(shares="equal"))
    assert {candidate.strategy.shares for candidate in equal.candidates} == {(48, 48), (96,)}
    by_speed = _search(nodes, allowed=SearchSpace(shares="by-speed"))
    assert by_speed.best.strategy.shares == (64, 32)


def test_the_best_few_differ_in_more_than_shares():
    top = _search(_nodes([0.8, 0.4, 0.2, 0.1]), keep=3).top
    assert len({replace(candidate.strategy, shares=()) for candidate in top}) == len(top) == 3
    assert top[0].why.startswith("the shortest predicted step")
    assert top[1].why


def test_the_plan_has_shares_groups_prediction_and_a_reason_for_each_choice(tmp_path):
    nodes = (*_nodes([0.8, 0.4, 0.2], "east", cores=2.5), *_nodes([0.8, 0.001], "west", cores=0.3))
    topology = Topology(nodes=nodes, uplinks=(Uplink(between=("east", "west"), bytes_per_s=2e7),))
    result = search(topology, JOB, predict=simple_prediction)
    plan = plan_of(result, topology, JOB, PlanRequest(shares="auto", seed=7), run="a-run")
    best = result.best
    assert tuple(worker.node for worker in plan.workers) == best.strategy.nodes
    assert plan.weights == list(best.strategy.shares)
    assert sum(plan.weights) == plan.batch == 96
    assert (plan.groups, plan.collective, plan.overlap) == (
        best.strategy.groups,
        best.strategy.collective,
        best.strategy.overlap,
    )
    assert (plan.factors, plan.codec, plan.sync, plan.seed) == ("never", "none", "full", 7)
    assert plan.adapt_shares
    assert [worker.threads for worker in plan.workers] == [2, 2, 2, 1]
    assert plan.predicted_step_s == plan.predicted.step_s == best.step_s
    assert [out.node for out in plan.left_out] == ["west-1"]
    chosen = {"collective", "overlap", "factors", "codec", "sync"}
    assert set(plan.reasons) >= {"job", "nodes", "shares", *chosen}
    assert all(plan.reasons.values())
    assert "4 of 5" in plan.reasons["nodes"]
    assert "equal ones would take" in plan.reasons["shares"]
    assert plan.candidates[0].step_s >= plan.predicted_step_s
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert Plan.read(tmp_path / "plan.toml") == plan


def test_emulated_speeds_follow_their_nodes_into_the_plan():
    topology = Topology(nodes=_nodes([1, 0.001, 0.5]))
    result = search(topology, JOB, predict=simple_prediction)
    plan = plan_of(result, topology, JOB, PlanRequest(speeds=(1, 0.1, 0.5), threads=2), run="a-run")
    assert [(worker.node, worker.speed) for worker in plan.workers] == [("main-0", 1), ("main-2", 0.5)]
    assert {worker.threads for worker in plan.workers} == {2}


def test_a_strategy_in_a_line():
    strategy = RunStrategy(nodes=("a", "b"), shares=(3, 1), collective="ring", factors=True)
    assert strategy_text(strategy) == "2 nodes (a, b), shares 3,1, ring, overlap backward, factors"
    assert strategy_text(RunStrategy(nodes=("a",), shares=(4,))) == "a alone"


def test_a_thousand_nodes_need_few_predictions():
    nodes = tuple(
        Node(
            name=f"n{index}",
            site=f"s{index % 4}",
            speed=(0.1, 0.5, 1.0)[index % 3],
            up_bytes_per_s=1e8,
            down_bytes_per_s=1e8,
        )
        for index in range(1000)
    )
    pairs = [(one, other) for one in range(4) for other in range(one)]
    uplinks = tuple(Uplink(between=(f"s{one}", f"s{other}"), bytes_per_s=1e8) for one, other in pairs)
    result = _search(nodes, replace(JOB, batch=16_000), uplinks=uplinks)
    assert not result.complete
    assert sum(40 + len(one.strategy.nodes) for one in result.candidates) <= 1.2 * SearchSpace().most_work
    assert len(result.best.strategy.nodes) > 100
    equal = [one for one in result.candidates if len(one.strategy.nodes) == 1000]
    assert result.best.step_s < max(one.step_s for one in equal)


def test_one_node_alone_wins_by_a_little_over_two():
    result = _search(_nodes([1, 0.1], rate=1.4e6))
    assert result.best.strategy.nodes == ("main-0",)
    assert result.best.step_s > 0.85 * min(one.step_s for one in result.candidates[1:])


@pytest.mark.parametrize("latency_s", [2e-4, 5e-4, 1e-3, 2e-3, 5e-3])
def test_about_the_best_number_of_nodes_that_are_alike_is_found(latency_s):
    nodes = _nodes([1] * 40, latency_s=latency_s)
    allowed = SearchSpace(collectives=("ring",), hierarchies=False, overlaps=("backward",))
    result = _search(nodes, allowed=allowed)
    topology = Topology(nodes=nodes)
    steps = []
    for count in range(1, 41):
        shares = best_shares([JOB.cost] * count, JOB.batch)
        names = tuple(node.name for node in nodes[:count])
        strategy = RunStrategy(nodes=names, shares=shares, collective="ring")
        steps.append(simple_prediction(topology, JOB, strategy).step_s)
    # Whole samples make it rugged: 40 nodes compute as long as 32.
    assert result.best.step_s <= 1.02 * min(steps)


@pytest.mark.parametrize(
    ("space", "syncs"),
    [
        (SearchSpace(), {"full", "local(8)"}),
        (SearchSpace().exactly(), {"full"}),
        (SearchSpace(codecs=("one-bit",)), {"full"}),
        (SearchSpace(syncs=("local(4)",)).exactly(), {"local(4)"}),
    ],
    ids=["inexact", "exact", "a codec is fixed", "a policy is fixed"],
)
def test_policies_are_tried_where_results_may_change(space, syncs):
    topology = Topology(nodes=_nodes([0.8, 0.4, 0.2]))
    ways = ways_of(topology, JOB, topology.nodes, space)
    assert {way.sync for way in ways} == syncs


def test_a_policy_has_the_collective_that_the_user_fixed():
    topology = Topology(nodes=_nodes([0.8, 0.4, 0.2]))
    ways = ways_of(topology, JOB, topology.nodes, SearchSpace(collectives=("ring",), hierarchies=False))
    assert {way.arrangement.collective for way in ways if way.codec == "none"} == {"ring"}
