"""Machines as a run knows them: the plan's names, what the links showed, and stated speeds."""

from __future__ import annotations

import pytest

from echelon.comm.meet.links import Links
from echelon.plan.plan import Plan, WorkerPlan
from echelon.train.profiling import machine_topology


def _plan(nodes, speeds) -> Plan:
    workers = tuple(
        WorkerPlan(rank=rank, node=node, weight=1, threads=2, speed=speed)
        for rank, (node, speed) in enumerate(zip(nodes, speeds, strict=True))
    )
    return Plan(run="x", workers=workers)


def test_workers_of_a_machine_are_one_node_with_their_speeds_together():
    plan = _plan(["a", "a", "b"], [0.5, 0.5, 0.25])
    ends = [(one, other) for one in range(3) for other in range(3) if one != other]
    links = Links(size=3, latency_s=dict.fromkeys(ends, 1e-4), bytes_per_s=dict.fromkeys(ends, 1e7))
    found = machine_topology(plan, [[0, 1], [2]], links)
    assert [(node.name, node.speed, node.cores) for node in found.nodes] == [("a", 2, 4), ("b", 0.5, 2)]
    one, other = found.nodes
    assert found.bytes_per_s(one, other) == pytest.approx(1e7, rel=0.3)
    assert found.known == "measured when workers joined"


def test_machines_of_one_name_stay_apart_and_unmeasured_links_count_as_unlimited():
    found = machine_topology(_plan(["a", "a"], [1, 1]), [[0], [1]], None)
    assert [node.name for node in found.nodes] == ["a-0", "a-1"]
    assert found.bytes_per_s(*found.nodes) == float("inf")
