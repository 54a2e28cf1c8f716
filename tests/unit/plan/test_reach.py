"""Nodes that cannot take part are named, with the reason."""

from __future__ import annotations

import math

import pytest

from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.reach import reaches, usable_nodes
from echelon.plan.topology import Node, Topology, Uplink

JOB = JobProfile(
    name="job",
    batch=8,
    cost=ComputeCost(fixed_s=0.1, per_sample_s=0.1),
    layers=(Layer(name="only", size_bytes=100),),
    base_bytes=100,
    sample_bytes=10,
)


def _usable(*nodes, uplinks=()):
    found = usable_nodes(Topology(nodes=nodes, uplinks=uplinks), JOB)
    names = [node.name for node in found.together], [node.name for part in found.apart for node in part]
    return *names, {out.node: out.why for out in found.left_out}


def test_nodes_of_one_site_can_all_take_part():
    assert _usable(Node(name="a"), Node(name="b")) == (["a", "b"], [], {})


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (Node(name="x", speed=0.0), "it does not compute: its speed is 0"),
        (Node(name="x", speed=1e-320), "it does not compute: a sample takes forever"),
        (
            Node(name="x", memory_bytes=109),
            "a worker needs 110 B for the model and one sample, it has 109 B",
        ),
    ],
)
def test_a_node_that_cannot_compute_its_part_is_left_out(broken, why):
    assert _usable(Node(name="a"), broken) == (["a"], [], {"x": why})


@pytest.mark.parametrize(
    "broken", [{"up_bytes_per_s": 0.0}, {"down_bytes_per_s": 0.0}, {"latency_s": math.inf}]
)
def test_a_node_whose_link_carries_nothing_can_only_train_alone(broken):
    together, alone, why = _usable(Node(name="a"), Node(name="x", **broken))
    assert (together, alone) == (["a"], ["x"])
    assert why == {"x": "its link carries nothing"}


@pytest.mark.parametrize("uplinks", [(), (Uplink(between=("e", "w"), bytes_per_s=0.0),)])
def test_of_sites_that_cannot_reach_each_other_the_strongest_is_used(uplinks):
    nodes = [Node(name="a", site="w"), Node(name="b", site="e"), Node(name="c", site="e")]
    together, alone, why = _usable(*nodes, uplinks=uplinks)
    assert (together, alone) == (["b", "c"], ["a"])
    assert why == {"a": "no link with bandwidth leads from e to its site w"}


def test_sites_reach_each_other_over_a_third():
    uplinks = (Uplink(between=("e", "m")), Uplink(between=("m", "w")))
    nodes = tuple(Node(name=site, site=site) for site in "emw")
    assert reaches(Topology(nodes=nodes, uplinks=uplinks), "e", "w")
    assert _usable(*nodes, uplinks=uplinks)[0] == ["e", "m", "w"]
