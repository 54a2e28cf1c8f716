"""The first seed's equations for a job on machines, in seconds."""

from __future__ import annotations

import pytest

from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.static_choice import static_choice
from echelon.plan.topology import Node

JOB = JobProfile(
    name="job",
    batch=8,
    cost=ComputeCost(fixed_s=0.0, per_sample_s=0.5),
    layers=(Layer(name="only", size_bytes=1_000_000),),
)


def test_one_group_is_compared_with_one_node():
    nodes = [Node(name=name, up_bytes_per_s=1e7, down_bytes_per_s=1e6) for name in "abcd"]
    choice = static_choice(JOB, nodes)
    assert [(option.name, option.equation) for option in choice.options] == [
        ("serial", "m N"),
        ("M1", "n T_r + N"),
    ]
    assert [option.cost for option in choice.options] == pytest.approx([4.0, 2.0])  # N is 1 s, n T_r is 1 s
    assert choice.best.name == "M1"


def test_nodes_ten_times_slower_are_a_second_group():
    nodes = [
        Node(name="a"),
        Node(name="b", speed=0.5),
        Node(name="c", speed=0.1),
        Node(name="d", speed=0.09),
    ]
    choice = static_choice(JOB, nodes)
    assert [option.name for option in choice.options] == ["serial", "M1", "M1 M2"]
    # (1): N (4 / 2 + 1); (2): N 4 / (10 * 2 + 2), with N = 1 s
    assert [option.cost for option in choice.options] == pytest.approx([4.0, 3.0, 4 / 22])


def test_a_link_of_zero_does_not_end_in_an_exception():
    assert static_choice(JOB, [Node(name="a", up_bytes_per_s=0.0)]).best.name in ("serial", "M1")
