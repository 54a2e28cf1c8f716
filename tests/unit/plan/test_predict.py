"""Predictions of single situations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echelon.errors import ConfigError
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.predict.engine_costs import CodecCost, EngineCosts, burst_s
from echelon.plan.predict.predict import predict, simulate_steps
from echelon.plan.predict.scaling import scaling_curve, what_helps
from echelon.plan.strategy import RunStrategy
from echelon.plan.topology import Node, Topology, Uplink

JOB = JobProfile(
    name="eight layers",
    batch=64,
    cost=ComputeCost(fixed_s=1e-3, per_sample_s=1e-3, apply_s=1e-3),
    layers=tuple(Layer(name=f"l{at}", size_bytes=1 << 20, ready_at=1 - 0.08 * at) for at in range(8)),
    base_bytes=1e6,
    sample_bytes=1e3,
)
FREE = EngineCosts(
    step_s=0, parameter_s=0, bucket_s=0, fill_s_per_byte=0, message_s=0, byte_s=((1.0, 0.0),), latency_s=0,
    settle_s=0,
)  # fmt: skip


def flat(count: int, rate: float = 1.2e8, **fields: float) -> Topology:
    return Topology(
        nodes=tuple(
            Node(name=f"n{at}", up_bytes_per_s=rate, down_bytes_per_s=rate, **fields) for at in range(count)
        )
    )


def two_sites(uplink: float) -> Topology:
    nodes = flat(4).nodes
    placed = tuple(replace(node, site="east" if at < 2 else "west") for at, node in enumerate(nodes))
    return Topology(nodes=placed, uplinks=(Uplink(between=("east", "west"), bytes_per_s=uplink),))


def even(topology: Topology, **fields: object) -> RunStrategy:
    names = tuple(node.name for node in topology.nodes)
    return RunStrategy(nodes=names, shares=(64 // len(names),) * len(names), **fields)  # type: ignore[arg-type]


def test_a_ring_on_slow_links_takes_as_long_as_its_bytes():
    topology = flat(4, rate=1e6)
    found = predict(topology, JOB, even(topology, collective="ring"), FREE)
    wire_s = 2 * 3 / 4 * JOB.gradient_bytes / 1e6
    assert found.step_s == pytest.approx(wire_s, rel=0.05)
    assert found.bottleneck.startswith("the link of n")


def test_fast_links_hide_all_but_the_last_bucket():
    topology = flat(2, rate=1e10)
    found = predict(topology, JOB, even(topology, collective="ring"), FREE)
    assert found.step_s == pytest.approx(33e-3 + 1e-3, rel=0.05)
    assert found.bottleneck == "computing on n0"


def test_overlap_with_the_next_step_hides_more():
    topology = flat(2, rate=2.5e8)
    backward = predict(topology, JOB, even(topology, collective="ring"), FREE)
    step = predict(topology, JOB, even(topology, collective="ring", overlap="step"), FREE)
    assert backward.exposed_s > 0
    assert step.step_s < backward.step_s


def test_the_slow_node_keeps_the_others_waiting():
    topology = flat(3, rate=1e10)
    slow = replace(topology, nodes=(*topology.nodes[:2], replace(topology.nodes[2], speed=0.25)))
    found = predict(slow, JOB, replace(even(slow), shares=(22, 21, 21)))
    assert found.bottleneck == "computing on n2"
    assert found.wait_s[0] > found.wait_s[2]


def test_communication_takes_cpu_time_from_computing_under_a_quota():
    topology = flat(2, speed=0.1, cores=0.1)
    costly = EngineCosts(byte_s=((1.0, 5e-9),))
    assert (
        predict(topology, JOB, even(topology), costly).step_s
        > 1.2 * predict(topology, JOB, even(topology), FREE).step_s
    )
    wide = flat(2, speed=0.1, cores=2.0)
    assert (
        predict(wide, JOB, even(wide), costly).step_s
        < predict(topology, JOB, even(topology), costly).step_s
    )


def test_a_burst_within_a_period_runs_at_full_speed_and_a_long_one_at_the_quota():
    assert burst_s(1e-3, 0.1) == 1e-3
    assert burst_s(1.0, 0.1) == pytest.approx(10.0, rel=0.01)
    assert burst_s(1.0, 2.0) == 1.0


def test_a_hierarchy_sends_less_over_the_uplink_than_a_ring_in_mixed_order():
    topology = two_sites(1e7)
    mixed = even(topology, collective="ring")
    mixed = replace(mixed, nodes=("n0", "n2", "n1", "n3"))
    groups = even(topology, collective="hierarchical(sizes=[2, 2])", groups=((0, 1), (2, 3)))
    ring, hierarchy = (predict(topology, JOB, one) for one in (mixed, groups))
    assert hierarchy.link_bytes["east/west"] < ring.link_bytes["east/west"] / 2
    assert hierarchy.step_s < ring.step_s
    assert ring.bottleneck == "the uplink east/west"


def test_groups_say_who_is_whose_neighbour():
    topology = two_sites(1e7)
    by_rank = even(topology, collective="hierarchical(sizes=[2, 2])", groups=((0, 1), (2, 3)))
    renamed = replace(by_rank, nodes=("n0", "n2", "n1", "n3"), groups=((0, 2), (1, 3)))
    assert predict(topology, JOB, renamed).step_s == pytest.approx(predict(topology, JOB, by_rank).step_s)


def test_exchanges_of_statistics_make_all_workers_wait_for_each_other():
    topology = flat(4)
    plain = predict(topology, JOB, even(topology)).step_s
    many = predict(topology, replace(JOB, exchanges=40), even(topology)).step_s
    assert many > plain + 40 * EngineCosts().exchange_s / 2


def test_a_codec_sends_fewer_bytes():
    topology = flat(2, rate=1e7)
    engine = EngineCosts(codecs={"tiny": CodecCost(smaller=8.0)})
    dense = predict(topology, JOB, even(topology), engine)
    coded = predict(topology, JOB, even(topology, codec="tiny"), engine)
    assert coded.link_bytes["n0"] == pytest.approx(dense.link_bytes["n0"] / 8, rel=0.01)
    assert coded.step_s < dense.step_s


def test_a_codec_between_groups_encodes_only_what_crosses():
    topology = two_sites(1e6)
    engine = EngineCosts(codecs={"tiny": CodecCost(smaller=8.0)})
    groups = even(topology, collective="hierarchical(sizes=[2, 2])", groups=((0, 1), (2, 3)))
    dense = predict(topology, JOB, groups, engine)
    coded = predict(topology, JOB, replace(groups, codec="between(tiny)"), engine)
    assert coded.link_bytes["east/west"] == pytest.approx(dense.link_bytes["east/west"] / 8, rel=0.01)
    assert coded.link_bytes["n0"] > dense.link_bytes["n0"] / 2


def test_factors_of_a_large_linear_layer_send_fewer_bytes():
    topology = flat(2, rate=1e7)
    job = replace(JOB, layers=(Layer(name="fc", size_bytes=4 << 20, factors=(1024, 1024)),))
    dense = predict(topology, job, even(topology))
    factored = predict(topology, job, even(topology, factors=True))
    assert factored.link_bytes["n0"] == pytest.approx(2 * 32 * 2048 * 4)
    assert factored.step_s < dense.step_s


def test_averaging_every_k_steps_costs_a_kth_of_the_bytes():
    topology = flat(4, rate=1e7)
    often = predict(topology, JOB, even(topology, sync="local(2)", collective="ring"))
    seldom = predict(topology, JOB, even(topology, sync="local(16)", collective="ring"))
    assert often.link_bytes["n0"] == pytest.approx(8 * seldom.link_bytes["n0"])
    assert seldom.step_s < often.step_s < predict(topology, JOB, even(topology, collective="ring")).step_s


def test_asynchronous_workers_do_not_wait_for_a_slow_one():
    topology = flat(4, rate=1e10)
    slow = replace(topology, nodes=(*topology.nodes[:3], replace(topology.nodes[3], speed=0.1)))
    full = predict(slow, JOB, even(slow))
    loose = predict(slow, JOB, even(slow, sync="async", servers=1))
    assert loose.samples_per_s > 2 * full.samples_per_s


def test_one_server_on_a_slow_link_limits_asynchronous_workers():
    topology = flat(8, rate=1e7)
    one = predict(topology, JOB, even(topology, sync="async", servers=1))
    four = predict(topology, JOB, even(topology, sync="async", servers=4))
    assert four.samples_per_s > 2 * one.samples_per_s


def test_levels_reduce_inside_groups_and_average_between_them():
    topology = two_sites(1e6)
    groups = ((0, 1), (2, 3))
    levels = predict(
        topology, JOB, even(topology, sync="levels(inner=full, outer=local(10))", groups=groups)
    )
    every = predict(topology, JOB, even(topology, collective="hierarchical(sizes=[2, 2])", groups=groups))
    assert levels.link_bytes["east/west"] == pytest.approx(every.link_bytes["east/west"] / 10, rel=0.01)
    assert levels.step_s < every.step_s


def test_workers_of_one_node_exchange_bytes_through_memory():
    topology = flat(2, rate=1e6)
    beside = RunStrategy(nodes=("n0", "n0"), shares=(32, 32), collective="ring")
    found = predict(topology, JOB, beside)
    assert not any(found.link_bytes.values())
    assert found.step_s < 0.1


def test_noise_makes_many_workers_slower_and_the_seed_repeats_it():
    topology = flat(16)
    quiet = predict(topology, JOB, even(topology)).step_s
    noisy = simulate_steps(topology, JOB, even(topology), 20, 0.3, seed=1)
    assert noisy.mean() > quiet
    assert np.array_equal(noisy, simulate_steps(topology, JOB, even(topology), 20, 0.3, seed=1))
    assert np.allclose(simulate_steps(topology, JOB, even(topology), 3, 0.0), quiet, rtol=1e-3)


def test_a_curve_has_a_prediction_for_each_count():
    curve = scaling_curve(flat(1, rate=1e10).nodes[0], JOB, (1, 2, 4, 1000))
    assert [count for count, _ in curve] == [1, 2, 4, 1000]
    assert curve[1][1].step_s < curve[0][1].step_s
    grown = scaling_curve(flat(1, rate=1e10).nodes[0], JOB, (1, 8), grow=True)
    assert grown[1][1].samples_per_s > grown[0][1].samples_per_s


def test_a_faster_uplink_helps_most_where_it_is_the_bottleneck():
    topology = two_sites(5e5)
    found = what_helps(
        topology, JOB, even(topology, collective="hierarchical(sizes=[2, 2])", groups=((0, 1), (2, 3)))
    )
    assert found[0].what == "twice the rate between east/west"
    assert found[0].gain > 0.8


def test_a_faster_cpu_helps_most_where_one_node_is_slow():
    topology = flat(3)
    slow = replace(topology, nodes=(*topology.nodes[:2], replace(topology.nodes[2], speed=0.1)))
    found = what_helps(slow, JOB, replace(even(slow), shares=(22, 21, 21)))
    assert found[0].what == "a CPU of twice the speed on n2"


def test_an_unknown_node_is_named():
    with pytest.raises(ConfigError, match="no node nobody"):
        predict(flat(2), JOB, RunStrategy(nodes=("n0", "nobody"), shares=(1, 1)))


def test_shares_are_needed_for_every_node():
    with pytest.raises(ConfigError, match="2 nodes have 1 shares"):
        predict(flat(2), JOB, RunStrategy(nodes=("n0", "n1"), shares=(1,)))
