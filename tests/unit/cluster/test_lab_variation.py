"""Jitter and loss without netem: what the pure parts promise of rates and cuts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.lab.network import rate_line, shaping_lines
from echelon.cluster.lab.spec import LabSpec, parse_lab
from echelon.cluster.lab.variation import CARRIED_S, CUT_S, cut_s, jitter_interval, open_s
from echelon.errors import ConfigError

NODE = '[[node]]\nname = "a"\n'


def parse(text: str) -> LabSpec:
    return parse_lab(text, file="lab.toml", name="lab")


@given(st.integers(), st.floats(0, 10))
def test_an_interval_carries_the_same_amount_later_by_at_most_twice_the_jitter(
    seed: int, jitter_s: float
) -> None:
    interval = jitter_interval(random.Random(seed), jitter_s)
    assert interval.seconds * interval.factor == pytest.approx(CARRIED_S)
    assert CARRIED_S <= interval.seconds <= CARRIED_S + 2 * jitter_s + 1e-9


def test_intervals_are_late_by_the_jitter_on_average_with_the_deviation_of_a_uniform_draw() -> None:
    draw = random.Random(0)
    late = [jitter_interval(draw, 0.01).seconds - CARRIED_S for _ in range(20_000)]
    mean = sum(late) / len(late)
    deviation = (sum((one - mean) ** 2 for one in late) / len(late)) ** 0.5
    assert mean == pytest.approx(0.01, rel=0.02)
    assert deviation == pytest.approx(0.01 / 3**0.5, rel=0.02)


@given(st.floats(0.001, 0.5), st.integers(), st.floats(0, 0.01))
def test_a_link_drops_for_the_stated_fraction_of_time_even_if_the_machine_is_late(
    loss: float, seed: int, late_s: float
) -> None:
    draw, late = random.Random(seed), random.Random(seed + 1)
    elapsed_s = dropped_s = 0.0
    for _ in range(300):
        wanted_s = cut_s(draw)
        elapsed_s += open_s(loss, dropped_s, elapsed_s, wanted_s)
        actual_s = wanted_s + late.uniform(0, late_s)  # a cut may last longer than asked
        elapsed_s += actual_s
        dropped_s += actual_s
    assert dropped_s / elapsed_s == pytest.approx(loss, rel=0.1)


@given(st.integers())
def test_cuts_are_short(seed: int) -> None:
    assert 0.5 * CUT_S <= cut_s(random.Random(seed)) <= 1.5 * CUT_S


def test_netem_gets_latency_jitter_and_loss_where_it_exists() -> None:
    netem, tbf = shaping_lines("eth0", 12.5e6, 0.005, 0.002, 0.015)
    assert netem == "qdisc replace dev eth0 root handle 1: netem delay 5000us 2000us loss 1.5% limit 20000"
    assert "parent 1:1" in tbf
    (alone,) = shaping_lines("eth0", None, 0.0, loss=0.5)
    assert "netem delay 0us loss 50% limit" in alone


def test_a_reduced_rate_keeps_burst_and_queue() -> None:
    whole, half = rate_line("eth0", 125e6), rate_line("eth0", 125e6, factor=0.5)
    assert half == whole.replace("1000000000bit", "500000000bit")


def test_jitter_and_loss_are_read_for_nodes_uplinks_and_faults() -> None:
    spec = parse(
        """
        [[node]]
        name = "a"
        count = 2
        site = "x"
        jitter = "2ms"
        loss = 0.01
        [[node]]
        name = "b"
        site = "y"
        [[uplink]]
        between = ["x", "y"]
        jitter = 0.005
        loss = "2.5 %"
        [[fault]]
        at_s = 1
        action = "jitter"
        link = "x/y"
        jitter = "50ms"
        [[fault]]
        at_step = 1
        action = "loss"
        node = "b"
        loss = "5%"
        """
    )
    assert [(node.jitter_s, node.loss) for node in spec.nodes] == [(0.002, 0.01)] * 2 + [(0.0, 0.0)]
    assert (spec.uplinks[0].jitter_s, spec.uplinks[0].loss) == (0.005, 0.025)
    assert [(fault.target, fault.jitter_s, fault.loss) for fault in spec.faults] == [
        ("x/y", 0.05, None),
        ("b", None, 0.05),
    ]
    assert spec.varies
    assert spec.link_names == ("a-0", "a-1", "b", "x/y")


def test_a_lab_varies_if_only_a_fault_says_so() -> None:
    assert not parse(NODE).varies
    assert parse(NODE + '[[fault]]\nat_s = 1\naction = "loss"\nnode = "a"\nloss = 0.1\n').varies


@pytest.mark.parametrize("loss", ['"x"', "true", '"60%"', "0.51", "-0.1", '"%"', "nan", "[1]"])
def test_a_loss_that_is_none_is_refused_with_its_place(loss: str) -> None:
    with pytest.raises(ConfigError, match="is not a loss") as found:
        parse(f"{NODE}loss = {loss}\n")
    assert found.value.where == "lab.toml, [[node]] 1, loss"


def test_a_jitter_that_is_too_long_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="jitter cannot be 11"):
        parse(f"{NODE}jitter = 11\n")


def test_a_fault_needs_the_value_of_its_action_and_no_other() -> None:
    with pytest.raises(ConfigError, match="action jitter needs jitter"):
        parse(NODE + '[[fault]]\nat_s = 1\naction = "jitter"\nnode = "a"\n')
    with pytest.raises(ConfigError, match="action cut does not take loss"):
        parse(NODE + '[[fault]]\nat_s = 1\naction = "cut"\nnode = "a"\nloss = 0.1\n')


def test_a_note_says_how_jitter_and_loss_are_emulated_without_netem() -> None:
    spec = parse(f'{NODE}jitter = "2ms"\n')
    (note,) = spec.notes(cores=2, netem=False)
    assert "jitter is emulated by varying rates" in note
    (kept,) = spec.notes(cores=2, netem=False, kept=True)
    assert "only while `echelon lab exec` runs" in kept
    assert spec.notes(cores=2, netem=True) == ()
