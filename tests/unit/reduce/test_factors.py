"""When a linear layer's factors are sent instead of its weight gradient."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.cost import LinkCost
from echelon.reduce.factors import LinearShape, decide

BYTES_ONLY = LinkCost(latency_s=0.0, seconds_per_byte=1e-9)
GIGABIT = LinkCost(latency_s=50e-6, seconds_per_byte=8e-9)
FLOPS = 50e9

sizes = st.integers(1, 5000)
rows = st.lists(st.integers(0, 600), min_size=2, max_size=9).filter(any)


def fc(rows_of=(32, 32, 32, 32), outputs=1024, inputs=1024, item_bytes=4):
    return LinearShape(
        name="fc1", rows_of=tuple(rows_of), inputs=inputs, outputs=outputs, item_bytes=item_bytes
    )


@given(rows, sizes, sizes, st.sampled_from([4, 8]))
@settings(max_examples=200, deadline=None)
def test_by_bytes_alone_factors_win_below_the_classic_break_even(rows_of, outputs, inputs, item_bytes):
    layer = fc(rows_of, outputs, inputs, item_bytes)
    choice = decide(layer, BYTES_ONLY, flops_per_s=math.inf, rule="auto")
    values, break_even = outputs + inputs, 2 * outputs * inputs
    assert choice.factor_bytes == (len(rows_of) - 1) * max(rows_of) * values * item_bytes
    if max(rows_of) * len(rows_of) * values != break_even:  # at the break-even either is right
        assert choice.factors == (max(rows_of) * len(rows_of) * values < break_even)


@given(rows, sizes, sizes, st.floats(1e6, 1e13), st.floats(0, 0.1))
@settings(max_examples=100, deadline=None)
def test_auto_takes_the_faster_form(rows_of, outputs, inputs, flops_per_s, latency_s):
    link = LinkCost(latency_s=latency_s, seconds_per_byte=1e-9)
    choice = decide(fc(rows_of, outputs, inputs), link, flops_per_s=flops_per_s, rule="auto")
    assert choice.factors == (choice.factor_s < choice.dense_s)


def test_dense_bytes_are_those_of_a_ring():
    choice = decide(fc(), GIGABIT, flops_per_s=FLOPS, rule="auto")
    assert choice.dense_bytes == 2 * 3 / 4 * 1024 * 1024 * 4
    assert choice.dense_s == pytest.approx(choice.dense_bytes * 8e-9)


def test_factor_time_counts_messages_bytes_and_the_rows_of_others():
    choice = decide(fc((8, 16, 32)), GIGABIT, flops_per_s=FLOPS, rule="auto")
    wire_s = 2 * 32 * 2048 * 4 * 8e-9
    arithmetic_s = 2 * (16 + 32) * 1024 * 1024 / FLOPS  # of the worker with 8 rows
    assert choice.factor_s == pytest.approx(2 * 50e-6 + wire_s + arithmetic_s)


def test_slow_processors_keep_a_layer_dense_that_has_fewer_bytes_as_factors():
    choice = decide(fc(), GIGABIT, flops_per_s=1e9, rule="auto")
    assert choice.factor_bytes < choice.dense_bytes
    assert not choice.factors


def test_latency_keeps_a_small_layer_dense():
    small = fc((1, 1), 84, 84)
    assert decide(small, BYTES_ONLY, flops_per_s=math.inf, rule="auto").factors
    assert not decide(
        small, LinkCost(latency_s=1e-3, seconds_per_byte=1e-9), flops_per_s=FLOPS, rule="auto"
    ).factors


def test_users_rule_overrides_the_cost_estimate():
    good, bad = fc(), fc((4096, 4096), 10, 84)
    assert not decide(good, GIGABIT, flops_per_s=FLOPS, rule="never").factors
    assert decide(bad, GIGABIT, flops_per_s=FLOPS, rule="always").factors
    assert "as asked" in decide(bad, GIGABIT, flops_per_s=FLOPS, rule="always").reason


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (fc((32,)), "nothing to send"),
        (fc(item_bytes=2), "neither float32 nor float64"),
    ],
)
@pytest.mark.parametrize("rule", ["auto", "always"])
def test_some_layers_stay_dense_by_any_rule(layer, why, rule):
    choice = decide(layer, GIGABIT, flops_per_s=FLOPS, rule=rule)
    assert not choice.factors
    assert why in choice.reason


def test_an_obstacle_seen_elsewhere_is_the_reason_given():
    choice = decide(fc(), GIGABIT, flops_per_s=FLOPS, rule="always", obstacle="it runs under autocast")
    assert not choice.factors
    assert choice.reason == "fc1 1024x1024: dense, it runs under autocast"


def test_an_unused_layer_stays_dense():
    assert not decide(fc((0, 0)), GIGABIT, flops_per_s=FLOPS, rule="auto").factors


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (
            fc((8, 8, 8, 8), 4096, 9216),
            "fc1 4096x9216: factors send 1.3 MB instead of 226.5 MB, 46.6 ms instead of 1.8 s",
        ),
        (
            fc((512, 512), 10, 84),
            "fc1 10x84: dense sends 3.4 kB instead of 192.5 kB, 27 µs instead of 1.6 ms",
        ),
    ],
)
def test_reason_names_layer_bytes_and_time(layer, reason):
    assert decide(layer, GIGABIT, flops_per_s=FLOPS, rule="auto").reason == reason
