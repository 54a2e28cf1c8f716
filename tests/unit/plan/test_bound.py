"""What limits a job, with the numbers that say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echelon.errors import PlanError
from echelon.plan.bound import classify, ring_seconds
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.topology import Node, Topology, Uplink

GIB = 2.0**30
JOB = JobProfile(
    name="job",
    batch=96,
    cost=ComputeCost(fixed_s=0.0, per_sample_s=0.01),
    layers=(Layer(name="first", size_bytes=500_000), Layer(name="last", size_bytes=500_000, ready_at=0.5)),
    base_bytes=GIB,
    sample_bytes=GIB / 16,
)


def _topology(count=4, rate=1e9, memory=64 * GIB, speed=1.0):
    return Topology(
        nodes=tuple(
            Node(name=f"n{i}", up_bytes_per_s=rate, down_bytes_per_s=rate, memory_bytes=memory, speed=speed)
            for i in range(count)
        )
    )


def test_a_job_on_fast_links_is_bound_by_computing():
    kind = classify(_topology(), JOB)
    assert kind.bound == "compute"
    assert kind.compute_s == pytest.approx(0.24)
    assert (kind.exposed_s, kind.memory_s) == (0.0, 0.0)
    assert "computes for 240.0 ms" in kind.why
    assert "all nodes" in kind.advice


def test_a_job_on_a_slow_link_is_bound_by_communication():
    kind = classify(_topology(rate=1e6), JOB)
    assert kind.bound == "communication"
    assert kind.exposed_s == pytest.approx(1.5 - 0.12)  # 2 * 3/4 MB at 1 MB/s; half of backward hides it
    assert "fewer nodes" in kind.advice


def test_a_predictor_says_what_is_not_hidden():
    class Told:
        exposed_s = 5.0

    kind = classify(_topology(), JOB, predict=lambda topology, job, strategy: Told())
    assert (kind.bound, kind.exposed_s) == ("communication", 5.0)


def test_a_job_whose_fast_node_lacks_memory_is_bound_by_memory():
    slow = _topology(3, speed=0.1).nodes
    topology = Topology(nodes=(*slow, Node(name="fast", speed=4.0, memory_bytes=0.5 * GIB)))
    kind = classify(topology, JOB)
    assert kind.bound == "memory"
    assert kind.too_small == ("fast",)
    assert "fast cannot hold the model" in kind.why
    assert kind.advice.startswith("leave out fast")
    assert kind.compute_s + kind.memory_s == pytest.approx(3.2)  # 32 samples each at 0.1 s


def test_shares_that_memory_limits_are_counted():
    small = Node(name="fast", speed=9.0, memory_bytes=1.25 * GIB)  # four samples
    topology = Topology(nodes=(replace(small, name="slow", speed=1.0, memory_bytes=99 * GIB), small))
    kind = classify(topology, JOB)
    assert kind.bound == "memory"
    assert kind.compute_s + kind.memory_s == pytest.approx(0.92)
    assert kind.needed_bytes == JOB.memory_bytes(92)


def test_a_job_that_fits_nowhere_is_refused():
    with pytest.raises(PlanError, match="a worker needs"):
        classify(_topology(memory=GIB), JOB)


def test_a_batch_smaller_than_the_nodes_uses_the_fastest():
    topology = Topology(nodes=(*_topology(3).nodes, Node(name="fast", speed=2.0)))
    kind = classify(topology, replace(JOB, batch=2))
    assert kind.compute_s == pytest.approx(0.01)


def test_a_ring_crosses_the_slowest_link_of_sites_in_order():
    nodes = (Node(name="a", site="e"), Node(name="b", site="w"), Node(name="c", site="e", latency_s=0.01))
    topology = Topology(nodes=nodes, uplinks=(Uplink(between=("e", "w"), bytes_per_s=1e6, latency_s=0.1),))
    assert ring_seconds(topology, JOB, nodes) == pytest.approx(4 * 0.11 + 4 / 3)
    assert ring_seconds(topology, JOB, nodes[:1]) == 0.0


def test_nodes_that_cannot_reach_each_other_leave_one_to_train_alone():
    nodes = tuple(Node(name=name, up_bytes_per_s=0.0) for name in "ab")
    kind = classify(Topology(nodes=nodes), JOB)
    assert (kind.bound, kind.compute_s) == ("compute", pytest.approx(0.96))
