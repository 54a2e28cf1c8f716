"""The learning-rate condition of bounded delay, and who is told."""

from __future__ import annotations

import pytest

from echelon.errors import ConfigError
from echelon.sync.delay_rate import rate_advice, safe_rate
from echelon.sync.policies.bounded_delay import BoundedDelay
from echelon.sync.policy import POLICIES, ClusterInfo


def test_a_delay_divides_the_rate_that_is_stable_without_it():
    assert safe_rate(0, synchronous=0.5) == 0.5
    assert safe_rate(4, synchronous=0.5) == pytest.approx(0.1)
    assert safe_rate(4, synchronous=0.5, summed_workers=5) == pytest.approx(0.02)


def test_a_lipschitz_constant_gives_the_rate_itself():
    assert safe_rate(3, lipschitz=2.0) == pytest.approx(1 / 8)


@pytest.mark.parametrize("delay", [0, 1, 3, 7])
def test_delayed_descent_on_a_quadratic_converges_at_the_safe_rate(delay):
    lipschitz = 4.0
    rate = safe_rate(delay, lipschitz=lipschitz)
    weights = [1.0] * (delay + 1)
    for _ in range(400 * (delay + 1)):
        weights.append(weights[-1] - rate * lipschitz * weights[-1 - delay])
    assert abs(weights[-1]) < 1e-6


def test_four_times_the_safe_rate_does_not_converge():
    delay, lipschitz = 7, 4.0
    rate = 4 * safe_rate(delay, lipschitz=lipschitz)
    weights = [1.0] * (delay + 1)
    for _ in range(2000):
        weights.append(weights[-1] - rate * lipschitz * weights[-1 - delay])
    assert abs(weights[-1]) > 1e6


@pytest.mark.parametrize(
    "wrong",
    [
        {"delay": -1, "synchronous": 1.0},
        {"delay": 1},
        {"delay": 1, "synchronous": 1.0, "lipschitz": 1.0},
        {"delay": 1, "synchronous": 0.0},
        {"delay": 1, "lipschitz": float("nan")},
        {"delay": 1, "synchronous": 1.0, "summed_workers": 0},
    ],
)
def test_what_makes_no_sense_is_refused(wrong):
    with pytest.raises(ConfigError) as caught:
        safe_rate(**wrong)
    assert caught.value.fix


def test_bounded_delay_advises_on_the_optimizers_rate():
    cluster = ClusterInfo(workers=3, servers=1, lr=0.1)
    advice = BoundedDelay(bound=4).advice(cluster)
    assert advice == rate_advice(4, 0.1)
    assert "a delay of 4 steps, 1/5 of a rate that is stable" in advice
    assert advice.endswith("0.1 is safe if 0.5 is stable there")
    summed = BoundedDelay(bound=1, scale="sum").advice(cluster)
    assert "1 step and 3 gradients applied in full, 1/6 of a rate" in summed


def test_nothing_is_advised_without_delay_or_rate_or_by_other_policies():
    cluster = ClusterInfo(workers=3, servers=1, lr=0.1)
    assert BoundedDelay(bound=0).advice(cluster) == ""
    assert BoundedDelay(bound=4).advice(ClusterInfo(workers=3, servers=1)) == ""
    assert POLICIES.build("full").advice(cluster) == ""
