import math
import random
from statistics import NormalDist

import pytest

from echelon.cluster.delay import DELAYS
from echelon.errors import ConfigError, UnknownName


def _draws(text: str, count: int = 2000) -> list[float]:
    delay, rng = DELAYS.build(text), random.Random(7)
    return [delay.sample(rng) for _ in range(count)]


def test_negative_draws_of_normal_count_as_zero():
    draws = _draws("normal(0, 0.25)")
    assert 0.45 < draws.count(0.0) / len(draws) < 0.55
    assert max(draws) > 0.5


AVERAGES_S = {
    "constant(0.2)": 0.2,
    "uniform(1, 3)": 2.0,
    "normal(0, 0.25)": 0.25 / math.sqrt(2 * math.pi),
    "normal(0.5, 0.25)": 0.5 * NormalDist().cdf(2) + 0.25 * NormalDist().pdf(2),
    "exponential(0.3)": 0.3,
    "pareto(0.1, 4)": 0.1 * 4 / 3,
    "sometimes(0.1, 2)": 0.2,
}


@pytest.mark.parametrize("text", AVERAGES_S)
def test_the_average_of_many_draws_is_the_theoretical_one(text):
    draws = _draws(text, 20_000)
    assert math.fsum(draws) / len(draws) == pytest.approx(AVERAGES_S[text], rel=0.05)


def test_normal_without_deviation_is_its_mean():
    assert set(_draws("normal(0.5, 0)")) == {0.5}
    assert set(_draws("normal(-0.5, 0)")) == {0.0}


def test_constant_never_changes():
    assert set(_draws("constant(0.2)")) == {0.2}


def test_uniform_stays_within_its_bounds_and_fills_them():
    draws = _draws("uniform(1, 3)")
    assert 1 <= min(draws) < 1.1
    assert 2.9 < max(draws) <= 3


def test_pareto_is_at_least_its_scale_and_has_a_heavier_tail_for_a_smaller_shape():
    heavy, light = _draws("pareto(0.1, 1.1)"), _draws("pareto(0.1, 4)")
    assert min(heavy) >= 0.1
    assert max(heavy) > 10 * max(light)


def test_sometimes_pauses_with_its_probability_and_always_as_long():
    draws = _draws("sometimes(0.1, 2)")
    assert set(draws) == {0.0, 2.0}
    assert 0.08 < draws.count(2.0) / len(draws) < 0.12


@pytest.mark.parametrize(("text", "pauses"), [("sometimes(0, 2)", {0.0}), ("sometimes(1, 2)", {2.0})])
def test_sometimes_with_probability_zero_or_one_is_never_or_always(text, pauses):
    assert set(_draws(text)) == pauses


def test_options_can_be_given_by_name():
    assert DELAYS.build("uniform(high=2, low=1)") == DELAYS.build("uniform(1, 2)")


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("normal(0, -0.1)", "deviation"),
        ("normal(nan, 1)", "mean"),
        ("normal(inf, 1)", "mean"),
        ("uniform(-1, 1)", "low"),
        ("uniform(0, inf)", "high"),
        ("uniform(2, 1)", "low"),
        ("exponential(-1)", "mean"),
        ("constant(-0.5)", "seconds"),
        ("pareto(-1, 2)", "scale"),
        ("pareto(1, 0)", "shape"),
        ("sometimes(1.5, 1)", "probability"),
        ("sometimes(-0.5, 1)", "probability"),
        ("sometimes(0.5, -1)", "seconds"),
    ],
)
def test_option_outside_its_range_is_an_error_that_names_it(text, option):
    with pytest.raises(ConfigError) as caught:
        DELAYS.build(text)
    assert option in caught.value.where
    assert caught.value.message.startswith(f"{option} is ")
    assert caught.value.fix


def test_error_for_reversed_bounds_gives_the_right_order():
    with pytest.raises(ConfigError) as caught:
        DELAYS.build("uniform(2, 1)")
    assert "uniform(1, 2)" in caught.value.fix


def test_misspelled_delay_names_the_nearest_one():
    with pytest.raises(UnknownName) as caught:
        DELAYS.build("norml(0, 1)")
    assert caught.value.nearest == "normal"
