import math
import random

import pytest

from echelon.cluster.delay import DELAYS
from echelon.errors import ConfigError, UnknownName


def _draws(text: str, count: int = 2000) -> list[float]:
    delay, rng = DELAYS.build(text), random.Random(7)
    return [delay.sample(rng) for _ in range(count)]


def test_normal_draws_below_zero_count_as_zero():
    draws = _draws("normal(0, 0.25)")
    assert 0.45 < draws.count(0.0) / len(draws) < 0.55
    assert max(draws) > 0.5


def test_normal_around_zero_pauses_a_tenth_of_a_second_on_average():
    assert DELAYS.build("normal(0, 0.25)").average_s() == pytest.approx(0.25 / math.sqrt(2 * math.pi))


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


def test_pareto_with_shape_one_has_no_finite_average():
    assert DELAYS.build("pareto(0.1, 1)").average_s() == math.inf


def test_sometimes_pauses_as_often_as_asked_and_always_as_long():
    draws = _draws("sometimes(0.1, 2)")
    assert set(draws) == {0.0, 2.0}
    assert 0.08 < draws.count(2.0) / len(draws) < 0.12


@pytest.mark.parametrize(("text", "pauses"), [("sometimes(0, 2)", {0.0}), ("sometimes(1, 2)", {2.0})])
def test_sometimes_at_its_ends_is_never_and_always(text, pauses):
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


def test_swapped_bounds_are_answered_with_the_right_order():
    with pytest.raises(ConfigError) as caught:
        DELAYS.build("uniform(2, 1)")
    assert "uniform(1, 2)" in caught.value.fix


def test_misspelled_delay_names_the_nearest_one():
    with pytest.raises(UnknownName) as caught:
        DELAYS.build("norml(0, 1)")
    assert caught.value.nearest == "normal"
