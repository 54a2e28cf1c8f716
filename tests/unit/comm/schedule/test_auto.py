"""The choice of `auto` by group, length and links, and its reason."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.schedule.collective import COLLECTIVES
from echelon.comm.schedule.collectives.auto import AutoCollective
from echelon.comm.schedule.cost import LinkCost
from echelon.errors import ConfigError
from schedules import predict

FAR = AutoCollective(latency_s=20e-3)
FAST = AutoCollective(latency_s=20e-6, bytes_per_s=1.2e9)


@pytest.mark.parametrize(
    ("auto", "size", "length", "chosen"),
    [
        (AutoCollective(), 8, 1_000, "butterfly"),
        (AutoCollective(), 4, 1_000, "butterfly"),
        (AutoCollective(), 8, 100_000, "halving-doubling"),
        (AutoCollective(), 8, 16_000_000, "ring"),
        (AutoCollective(), 4, 16_000_000, "ring"),
        (AutoCollective(), 2, 1, "direct"),
        (AutoCollective(), 2, 16_000_000, "direct"),
        (FAR, 8, 1_000_000, "direct"),
        (FAST, 8, 1_000, "butterfly"),
    ],
)
def test_the_choice_follows_from_group_length_and_links(auto, size, length, chosen):
    assert auto.choose(size, length) == chosen


def test_the_choice_differs_between_links():
    slow = AutoCollective(latency_s=1e-4, bytes_per_s=1.2e6)
    assert AutoCollective().choose(8, 4_000) == "butterfly"
    assert slow.choose(8, 4_000) == "halving-doubling"


def test_the_schedule_is_that_of_the_chosen_collective():
    for length in (1_000, 100_000, 16_000_000):
        chosen = COLLECTIVES.build(AutoCollective().choose(8, length))
        assert AutoCollective().schedule(3, 8, length) == chosen.schedule(3, 8, length)


def test_the_reason_names_the_choice_its_advantage_and_the_links():
    reason = AutoCollective(latency_s=50e-6, bytes_per_s=1.2e8).reason(8, 4_000)
    assert reason == (
        "butterfly: 8 workers, 4.0 kB: 3 steps of latency beat 14, at 120.0 MB/s and 50 µs a step"
    )


@given(st.integers(1, 16), st.integers(0, 5_000_000))
@settings(max_examples=60, deadline=None)
def test_reason_and_choice_agree(size, length):
    assert (
        AutoCollective().reason(size, 4 * length).startswith(f"{AutoCollective().choose(size, length)}: ")
    )


@given(st.integers(3, 12), st.integers(1, 1_000_000), st.floats(0, 0.1), st.floats(1e5, 1e10))
@settings(max_examples=60, deadline=None)
def test_no_registered_flat_collective_is_much_cheaper(size, length, latency_s, bytes_per_s):
    auto = AutoCollective(latency_s=latency_s, bytes_per_s=bytes_per_s)
    add_s = 1 / auto.reduce_bytes_per_s
    chosen = predict(COLLECTIVES.build(auto.choose(size, length)), size, 4 * length, auto.link, add_s)
    rounding_s = 20 * size * (auto.link.seconds_per_byte + add_s)  # schedules move whole elements
    for other in ("ring", "direct", "halving-doubling", "butterfly"):
        cost = predict(COLLECTIVES.build(other), size, 4 * length, auto.link, add_s)
        assert chosen <= 1.01 * cost + rounding_s


def test_the_printed_text_builds_the_same_collective():
    auto = AutoCollective.measured(LinkCost(latency_s=5e-5, seconds_per_byte=8e-9))
    assert auto == AutoCollective(latency_s=5e-5, bytes_per_s=1.25e8)
    assert COLLECTIVES.build(str(auto)) == auto
    assert COLLECTIVES.build("auto(latency_s=5e-5, bytes_per_s=125000000)") == auto


def test_links_without_a_measured_bandwidth_get_the_default():
    assert (
        AutoCollective.measured(LinkCost(latency_s=1e-4, seconds_per_byte=0.0)).bytes_per_s
        == AutoCollective().bytes_per_s
    )


@pytest.mark.parametrize(
    "options",
    ["latency_s=-1", "bytes_per_s=0", "bytes_per_s=-5", "reduce_bytes_per_s=0"],
)
def test_impossible_links_are_refused(options):
    with pytest.raises(ConfigError, match="cannot be") as caught:
        COLLECTIVES.build(f"auto({options})")
    assert options.partition("=")[0] in caught.value.where


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_refused(value):
    with pytest.raises(ConfigError, match="cannot be"):
        AutoCollective(bytes_per_s=value)
