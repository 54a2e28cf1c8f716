"""A recorded run is rebuilt from its events, and predicted with changes. The predictor here is a toy."""

from __future__ import annotations

import msgspec
import pytest

from echelon.errors import ConfigError, UnknownName
from echelon.observe.events import BucketReduced, CollectiveChanged, LinkMeasured, SharesChanged, StepEnded
from echelon.plan.plan import Plan, PlannedUplink, WorkerPlan
from echelon.plan.strategy import Prediction
from echelon.simulate.recorded_job import recorded_job
from echelon.simulate.what_if import WhatIfChanges, changed, what_if

_PER_SAMPLE_S = {0: 0.001, 1: 0.002, 2: 0.004}
_FIXED = 4.0  # samples' worth, for every worker


def _plan(**more) -> Plan:
    sites = ["east", "east", "west"]
    workers = tuple(
        WorkerPlan(rank=rank, node=f"n{rank}", weight=1, site=sites[rank], link="1gbit")
        for rank in range(3)
    )
    uplinks = (PlannedUplink(between=("east", "west"), rate="80mbit", latency="5.0 ms"),)
    return Plan(run="x", **{"workers": workers, "uplinks": uplinks, **more})


def _events(steps=20, shares=(8, 8, 8)):
    for step in range(steps):
        for rank, share in enumerate(shares if step % 5 else [4, 4, 4]):
            compute_s = _PER_SAMPLE_S[rank] * (_FIXED + share)
            start = step * 0.06
            for index, ready in enumerate([0.5, 1.0]):
                yield BucketReduced(
                    t=0,
                    rank=rank,
                    step=step,
                    index=index,
                    size_bytes=1000 * (index + 1),
                    sent_bytes=1,
                    start=start + 0.001 + ready * compute_s,
                    encode_s=0,
                    begun=0,
                    sent=0,
                    ended=0,
                    adding_s=0,
                    wait_s=0,
                )
            yield StepEnded(
                t=0,
                rank=rank,
                step=step,
                epoch=0,
                start=start,
                data_s=0.001,
                compute_s=compute_s,
                arrival=0,
                wait_s=0,
                apply_s=0.0005,
                share=share,
                batch=sum(shares),
                sent_bytes=100,
            )


def _predict(topology, job, strategy) -> Prediction:
    compute = tuple(
        job.cost_on(topology.node(name)).at(share)
        for name, share in zip(strategy.nodes, strategy.shares, strict=True)
    )
    slowest = min([u.bytes_per_s for u in topology.uplinks] + [n.up_bytes_per_s for n in topology.nodes])
    exposed_s = 0.0 if strategy.codec == "one-bit" else job.gradient_bytes / slowest
    return Prediction(
        step_s=max(compute) + exposed_s,
        compute_s=compute,
        exposed_s=exposed_s,
        apply_s=0.0,
        wait_s=(0.0,) * len(compute),
        samples_per_s=1.0,
        efficiency=1.0,
        bottleneck="a toy",
    )


def test_costs_gradients_and_links_are_those_of_the_record():
    run = recorded_job(_events(), _plan())
    for rank, name in enumerate(run.strategy.nodes):
        cost = run.job.costs[name]
        assert cost.per_sample_s == pytest.approx(_PER_SAMPLE_S[rank], rel=0.15)
        assert cost.at(8) == pytest.approx(12 * _PER_SAMPLE_S[rank] + 0.001, rel=0.02)
        assert cost.apply_s == 0.0005
    assert [node.speed for node in run.topology.nodes] == pytest.approx([1, 0.52, 0.26], rel=0.1)
    assert [(layer.size_bytes, round(layer.ready_at, 6)) for layer in run.job.layers] == [
        (2000, 1.0),
        (1000, 0.5),
    ]
    assert run.topology.uplinks[0].bytes_per_s == 1e7
    assert run.topology.uplinks[0].latency_s == 0.005
    assert {node.up_bytes_per_s for node in run.topology.nodes} == {1.25e8}
    assert (run.job.batch, run.strategy.shares) == (24, (8, 8, 8))
    assert run.measured_s == pytest.approx(0.06)


def test_links_that_no_file_tells_come_from_what_workers_measured():
    workers = tuple(WorkerPlan(rank=rank, node=f"n{rank}") for rank in range(3))
    plan = _plan(workers=workers, uplinks=(), groups=((0, 1), (2,)))
    rates = {(0, 1): 1e8, (1, 2): 1e7, (2, 0): 1.2e7}
    links = [
        LinkMeasured(t=0, rank=one, peer=other, latency_s=0.002, bytes_per_s=rate)
        for (one, other), rate in rates.items()
    ]
    run = recorded_job([*_events(), *links], plan)
    assert [node.site for node in run.topology.nodes] == ["group-0", "group-0", "group-1"]
    assert run.topology.uplinks[0].bytes_per_s == 1.2e7
    assert run.topology.nodes[0].up_bytes_per_s == 1e8
    assert run.topology.latency_s(run.topology.nodes[0], run.topology.nodes[1]) == pytest.approx(0.002)


def test_the_collective_is_the_one_that_auto_became():
    def collective(reason: str, asked: str = "auto") -> str:
        plan = _plan(collective=asked, reasons={"collective": reason})
        return recorded_job(_events(), plan).strategy.collective

    assert collective("direct: 8 workers, 524.3 kB: 2 steps of latency beat 14") == "direct"
    assert collective("hierarchical(sizes=[2, 1]): two sites") == "hierarchical(sizes=[2, 1])"
    assert collective("auto; ring would take 20.8 ms instead of 20.7 ms") == "auto"
    assert collective("direct: 8 workers", asked="ring") == "ring"


def _rearranged_at(step: int, collective: str, groups=(), rank=0) -> CollectiveChanged:
    return CollectiveChanged(
        t=0, rank=rank, step=step, collective=collective, before="auto", reason="x", groups=list(groups)
    )


def _shared_at(step: int, shares: list[int]) -> SharesChanged:
    return SharesChanged(
        t=0, rank=0, step=step, shares=shares, before=[8, 8, 8], slowest=2, slowest_s=1, expected_s=1
    )


def test_the_arrangement_is_the_last_one_of_the_record():
    changes = [
        _rearranged_at(0, "ring", [[2, 0, 1]]),
        _rearranged_at(3, "hierarchical(outer=direct)", [[2], [0, 1]]),
        _rearranged_at(4, "ring", rank=1),  # of another worker, which has not read on yet
    ]
    strategy = recorded_job([*_events(), *changes], _plan()).strategy
    assert strategy.collective == "hierarchical(sizes=[1, 2], outer=direct)"
    assert strategy.groups == ((2,), (0, 1))
    again = [*changes, _rearranged_at(9, "auto(latency_s=0.1)")]
    strategy = recorded_job([*_events(), *again], _plan(groups=((0, 1), (2,)))).strategy
    assert (strategy.collective, strategy.groups) == ("auto", ((0, 1), (2,)))


def test_groups_that_the_run_found_are_sites_where_no_file_tells_them():
    workers = tuple(WorkerPlan(rank=rank, node=f"n{rank}") for rank in range(3))
    found = _rearranged_at(0, "hierarchical", [[0, 2], [1]])
    run = recorded_job([*_events(), found], _plan(workers=workers, uplinks=()))
    assert [node.site for node in run.topology.nodes] == ["group-0", "group-1", "group-0"]


def test_a_record_without_groups_has_the_collective_of_the_plan():
    reasons = {"collective": "hierarchical(sizes=[2, 1]): two sites"}
    run = recorded_job([*_events(), _rearranged_at(0, "hierarchical")], _plan(reasons=reasons))
    assert run.strategy.collective == "hierarchical(sizes=[2, 1])"


def test_shares_are_the_last_ones_of_a_full_batch():
    changes = [_shared_at(4, [10, 8, 6]), _shared_at(9, [14, 7, 3])]
    assert recorded_job([*_events(), *changes], _plan()).strategy.shares == (14, 7, 3)
    of_half_a_step = _shared_at(12, [7, 4, 1])
    assert recorded_job([*_events(), of_half_a_step], _plan()).strategy.shares == (8, 8, 8)


def test_a_step_takes_what_it_took_after_the_last_change():
    def slow_until(step: int):
        for event in _events(steps=40):
            if isinstance(event, StepEnded):
                begin = 0.5 * min(event.step, step) + 0.06 * max(0, event.step - step)
                event = msgspec.structs.replace(event, start=begin)
            yield event

    assert recorded_job(slow_until(28), _plan()).measured_s == pytest.approx(0.5)
    changed_at = [_shared_at(27, [14, 7, 3])]
    assert recorded_job([*slow_until(28), *changed_at], _plan()).measured_s == pytest.approx(0.06)
    too_late = [_shared_at(35, [14, 7, 3])]
    assert recorded_job([*slow_until(28), *too_late], _plan()).measured_s == pytest.approx(0.5)


def test_weights_of_a_collective_follow_their_nodes():
    run = recorded_job([*_events(), _rearranged_at(5, "direct(weights=[2, 1, 0])")], _plan())
    more = changed(run, WhatIfChanges(add=("n0",), drop=("n1",)))[2]
    assert more.nodes == ("n0", "n0+1", "n2")
    assert more.collective == "direct(weights=[2, 2, 0])"
    assert changed(run, WhatIfChanges(drop=("n0", "n1")))[2].collective == "direct"


def test_a_run_that_is_too_short_is_refused():
    with pytest.raises(ConfigError, match="too short"):
        recorded_job(_events(steps=1), _plan())


def test_without_changes_the_run_is_expected_to_take_what_it_took():
    run = recorded_job(_events(), _plan())
    found = what_if(run, WhatIfChanges(), _predict)
    assert found.recorded == found.changed
    assert found.expected_s == pytest.approx(run.measured_s)
    assert found.calibration == pytest.approx(0.06 / found.recorded.step_s)


def test_a_node_more_gets_a_share_and_computing_falls():
    run = recorded_job(_events(), _plan())
    found = what_if(run, WhatIfChanges(add=("n0:2",)), _predict)
    assert found.strategy.nodes == ("n0", "n0+1", "n0+2", "n1", "n2")
    assert sum(found.strategy.shares) == 24
    assert abs(found.strategy.shares[2] - found.strategy.shares[0]) <= 1
    assert found.changed.step_s < found.recorded.step_s
    assert found.reason.startswith("computing falls from")


def test_a_dropped_node_leaves_its_share_to_the_others_and_groups_shrink():
    plan = _plan(groups=((0, 1), (2,)), collective="hierarchical(sizes=[2, 1], inner=direct)")
    run = recorded_job(_events(), plan)
    _, _, strategy = changed(run, WhatIfChanges(drop=("n1",)))
    assert (strategy.nodes, strategy.groups) == (("n0", "n2"), ((0,), (1,)))
    assert strategy.collective == "hierarchical(sizes=[1, 1], inner=direct)"
    assert sum(strategy.shares) == 24
    _, _, strategy = changed(run, WhatIfChanges(add=("n1",)))
    assert (strategy.nodes, strategy.groups) == (("n0", "n1", "n1+1", "n2"), ((0, 1, 2), (3,)))
    assert strategy.collective == "hierarchical(sizes=[3, 1], inner=direct)"
    _, _, strategy = changed(run, WhatIfChanges(drop=("n0", "n1")))
    assert (strategy.nodes, strategy.collective) == (("n2",), "direct")


def test_links_and_codecs_can_be_others():
    run = recorded_job(_events(), _plan())
    faster = what_if(run, WhatIfChanges(links=("west/east=1gbit",)), _predict)
    assert faster.topology.uplinks[0].bytes_per_s == 1.25e8
    assert faster.changed.exposed_s < faster.recorded.exposed_s
    topology, _, _ = changed(run, WhatIfChanges(links=("n1=8mbit",)))
    assert topology.node("n1").up_bytes_per_s == topology.node("n1").down_bytes_per_s == 1e6
    assert topology.node("n0").up_bytes_per_s == 1.25e8
    assert what_if(run, WhatIfChanges(chosen=(("codec", "one-bit"),)), _predict).changed.exposed_s == 0


@pytest.mark.parametrize(
    ("changes", "nearest"),
    [
        (WhatIfChanges(add=("m1",)), "n1"),
        (WhatIfChanges(drop=("N2",)), "n2"),
        (WhatIfChanges(links=("east/wst=1gbit",)), "east/west"),
    ],
)
def test_an_unknown_name_names_the_nearest(changes, nearest):
    with pytest.raises(UnknownName) as error:
        changed(recorded_job(_events(), _plan()), changes)
    assert error.value.nearest == nearest


@pytest.mark.parametrize(
    "changes",
    [
        WhatIfChanges(drop=("n0", "n1", "n2")),
        WhatIfChanges(links=("east/west",)),
        WhatIfChanges(links=("east/west=0bit",)),
        WhatIfChanges(links=("east/west=fast",)),
        WhatIfChanges(add=("n0:many",)),
        WhatIfChanges(add=("n0:30",)),
    ],
)
def test_changes_that_cannot_be_are_refused(changes):
    with pytest.raises(ConfigError) as error:
        changed(recorded_job(_events(), _plan()), changes)
    assert error.value.where.startswith("--")
    assert error.value.fix
