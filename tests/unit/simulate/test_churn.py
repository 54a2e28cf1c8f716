"""Losses on the virtual clock."""

from __future__ import annotations

import pytest

from echelon.errors import ConfigError
from echelon.simulate.churn import ChurnSetting, parse_churn, parse_outage, simulate_churn


def test_without_faults_no_step_is_lost():
    found = simulate_churn(ChurnSetting(workers=4, seconds=5))
    assert found.steps >= found.ideal - 1
    assert (found.views, found.reduced, found.repeated, found.worst_pause_s) == (1, 0, 0, 0.0)


def test_killed_workers_cost_less_than_a_step_each_and_come_back():
    churn = (parse_churn("kill(rate=0.3)"),)
    found = simulate_churn(ChurnSetting(workers=12, seconds=40, churn=churn))
    assert found.faults > 3
    assert found.ideal - found.steps <= 4 * found.views
    assert found.mean_members > 10
    assert found == simulate_churn(ChurnSetting(workers=12, seconds=40, churn=churn))


def test_too_many_killed_workers_pause_the_run_until_they_are_back():
    outages = (parse_outage("kill(at=2, part=0.75)"),)
    found = simulate_churn(ChurnSetting(workers=8, seconds=10, outages=outages))
    assert found.worst_pause_s >= 3.0  # until the new processes have joined
    assert found.steps > 250


def test_workers_that_are_cut_off_are_left_out_and_return():
    outages = (parse_outage("cut(at=5, part=0.25, seconds=3)"),)
    found = simulate_churn(ChurnSetting(workers=8, seconds=20, outages=outages))
    assert found.views >= 3
    assert 7 < found.mean_members < 8


@pytest.mark.parametrize("text", ["kil(rate=1)", "kill(rate=0)", "kill(1)", "kill(rate=x)", "kill()"])
def test_a_churn_that_cannot_be_read_is_an_error(text):
    with pytest.raises(ConfigError):
        parse_churn(text)
