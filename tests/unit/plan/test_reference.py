"""Speeds have one meaning: relative to a stated reference, by which other machines are comparable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.plan.cluster_file import read_cluster, write_cluster
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.predict.predict import predict
from echelon.plan.strategy import RunStrategy
from echelon.plan.topology import Node, Topology

_LAYERS = (Layer(name="all", size_bytes=100_000),)


def _job(times, reference_s):
    cost = ComputeCost(fixed_s=0.002 * times, per_sample_s=0.001 * times, apply_s=0.001 * times)
    return JobProfile(name="job", batch=32, cost=cost, layers=_LAYERS, reference_s=reference_s)


@given(st.floats(0.1, 10))
def test_a_job_that_was_measured_here_and_one_of_the_probe_predict_the_same_step(slower):
    """This machine is slower than the probe's fastest node by a factor."""
    nodes = (Node(name="a", up_bytes_per_s=1e8, down_bytes_per_s=1e8), Node(name="b", speed=0.5))
    topology = Topology(nodes=nodes, reference_s=0.004)
    probed = _job(1.0, 0.004)
    here = _job(slower, 0.004 * slower)
    strategy = RunStrategy(nodes=("a", "b"), shares=(20, 12))
    expected = predict(topology, probed, strategy)
    found = predict(topology, here.on_topology(topology.reference_s), strategy)
    assert found.step_s == pytest.approx(expected.step_s)
    assert found.compute_s == pytest.approx(expected.compute_s)


def test_without_a_reference_the_machine_of_the_job_has_speed_1():
    assert _job(2.0, 0.0).on_topology(0.004) == _job(2.0, 0.0)
    assert _job(2.0, 0.008).on_topology(0.0) == _job(2.0, 0.008)


def test_a_cluster_file_keeps_the_reference():
    topology = Topology(nodes=(Node(name="a"),), known="k", reference_s=0.0031)
    read = read_cluster(write_cluster(topology, _job(1.0, 0.0031)), "x")
    assert read.topology.reference_s == pytest.approx(0.0031)
    assert read.job is not None
    assert read.job.reference_s == pytest.approx(0.0031)
