"""Equations (1) to (5) of the first seed against values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.plan.equations import (
    StaticCosts,
    cheapest,
    in_units,
    operation_ratio,
    parallel,
    parallel_one,
    serial,
)

# m = 24 jobs of n = 100 bytes, T_r = 0.2 for each byte, N = 10: n T_r + N = 100 * 0.2 + 10 = 30.
COSTS = StaticCosts(jobs=24, size=100, transfer=0.2, compute=10)


def test_serial_is_m_times_n():
    assert serial(COSTS) == 240  # 24 * 10


def test_a_job_or_none_for_each_node_takes_one_round():
    assert parallel_one(replace(COSTS, jobs=3), 4) == 30
    assert parallel_one(replace(COSTS, jobs=4), 4) == 30


def test_equation_1():
    assert parallel_one(COSTS, 4) == 210  # 30 * (24 / 4 + 1) = 30 * 7
    assert parallel_one(COSTS, 16) == 75  # 30 * (24 / 16 + 1) = 30 * 2.5


def test_equation_2():
    # 30 * 24 / (10 * 4 + 5) = 720 / 45
    assert parallel(COSTS, [4, 5]) == pytest.approx(16)


def test_equation_3():
    # 30 * 24 / (100 * 4 + 10 * 5 + 30) = 720 / 480
    assert parallel(COSTS, [4, 5, 30]) == pytest.approx(1.5)


def test_equations_4_and_5():
    # 30 * 24 / (1000 * 1 + 100 * 2 + 10 * 20 + 40) = 720 / 1440
    assert parallel(COSTS, [1, 2, 20, 40]) == pytest.approx(0.5)


def test_with_an_empty_second_group_equation_2_is_n_times_less_than_equation_1_without_its_one():
    # 30 * 24 / (10 * 4) = 18, and 30 * 24 / 4 = 180 = 10 * 18.
    assert parallel(COSTS, [4, 0]) == 18
    assert parallel_one(COSTS, 4) - COSTS.round == 180


def test_every_option_has_its_cost_and_the_least_is_chosen():
    choice = cheapest(COSTS, [4, 5, 30])
    assert [(option.name, option.cost, option.equation) for option in choice.options] == [
        ("serial", 240, "m N"),
        ("M1", 210, "(1)"),
        ("M1 M2", pytest.approx(16), "(2)"),
        ("M1 M2 M3", pytest.approx(1.5), "(3)"),
    ]
    assert choice.best.name == "M1 M2 M3"


def test_with_slow_transfers_one_node_alone_is_chosen():
    # m = 2 <= M_1 = 4: serial 2 * 10 = 20; parallel 100 * 5 + 10 = 510.
    choice = cheapest(StaticCosts(jobs=2, size=100, transfer=5, compute=10), [4])
    assert choice.best.name == "serial"
    assert [option.cost for option in choice.options] == [20, 510]


def test_an_operation_of_the_same_magnitude_differs_by_a_ratio():
    assert operation_ratio(2.0, 5.0) == 2.5
    other = replace(COSTS, ratio=operation_ratio(2.0, 5.0))
    assert serial(other) == 600  # 24 * 2.5 * 10
    assert parallel(other, [4, 5]) == pytest.approx(
        24
    )  # (20 + 25) * 24 / 45: the factor between groups stays


def test_seconds_become_units_in_which_n_is_the_factor_between_groups():
    # One job takes 0.5 s, so a unit is 0.05 s; 1 us for each byte is 1e-6 / 0.05 = 2e-5 units.
    costs, unit_s = in_units(StaticCosts(jobs=24, size=1e5, transfer=1e-6, compute=0.5))
    assert unit_s == pytest.approx(0.05)
    assert costs.compute == 10
    assert costs.transfer == pytest.approx(2e-5)
    assert serial(costs) * unit_s == pytest.approx(12)  # 24 * 0.5 s


@given(
    st.integers(1, 100),
    st.floats(0, 1e3),
    st.floats(1.0, 100),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_the_best_option_costs_no_more_than_any(jobs, transfer, compute, groups):
    choice = cheapest(StaticCosts(jobs=jobs, size=1, transfer=transfer, compute=compute), groups)
    assert len(choice.options) == len(groups) + 1
    assert all(choice.best.cost <= option.cost for option in choice.options)


@pytest.mark.parametrize("groups", [[], [4, 0], [-1]])
def test_groups_without_nodes_are_refused(groups):
    with pytest.raises(ConfigError, match="groups have"):
        cheapest(COSTS, groups)


@pytest.mark.parametrize(
    "wrong", [{"jobs": 0}, {"compute": 0}, {"ratio": -1}, {"size": -1}, {"transfer": -1}]
)
def test_impossible_costs_are_refused(wrong):
    with pytest.raises(ConfigError):
        replace(COSTS, **wrong)


def test_a_ratio_needs_two_costs():
    with pytest.raises(ConfigError, match="operations cost 0"):
        operation_ratio(0, 1)
