"""How many gradients make an update: curves, users' functions, and measured noise."""

from __future__ import annotations

import itertools
import math
import random
import sys
import types

import pytest

from echelon.config.allowed import allow_names_in
from echelon.errors import ConfigError
from echelon.sync.families.serve import Arrival
from echelon.sync.policy import POLICIES, ClusterInfo
from echelon.sync.threshold import THRESHOLDS, Curve

FOUR = ClusterInfo(workers=4, servers=1)
NUMBERS = itertools.count()  # a module of one name is imported once


@pytest.fixture
def function(monkeypatch):
    """Registers a user's function as a module and returns its threshold."""

    def make(call):
        name = f"a_users_threshold_{next(NUMBERS)}"
        module = types.ModuleType(name)
        module.grow = call
        monkeypatch.setitem(sys.modules, name, module)
        allow_names_in(f"function({name}:grow)")
        return f"function({name}:grow)"

    return make


def _gradient(square=0.0, dot=0.0):
    return Arrival(worker=0, step=0, t=0.0, square=square, dot=dot)


def _along(text, gradients, workers=4):
    growth = THRESHOLDS.build(text).growth(workers)
    return [growth.after(_gradient()) for _ in range(gradients)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("step(2)", [1, 2, 2, 3, 3, 4]),
        ("step(1.5)", [1, 2, 3, 3, 4, 4]),
        ("linear(0.5)", [1.5, 2, 2.5, 3, 3.5, 4]),
        ("linear(0)", [1] * 6),
        ("exponential(2)", [2**0.5, 2, 2**1.5, 4, 4, 4]),
        ("sigmoid(3, 0.01)", [1, 1, 3, 4, 4, 4]),
    ],
)
def test_curves_follow_their_formula_until_all_workers_are_reached(text, expected):
    assert _along(text, 6) == pytest.approx(expected)


def test_a_sigmoid_begins_at_one_and_reaches_all_workers():
    sigmoid = THRESHOLDS.build("sigmoid(1000, 100)")
    assert sigmoid.at(0, 25) == 1
    assert sigmoid.at(1000, 25) == 13
    assert sigmoid.at(2000, 25) == 25


@pytest.mark.parametrize(
    "text", ["step(1e-300)", "exponential(1e-9)", "sigmoid(1e9, 1e-9)", "linear(1e300)"]
)
def test_extreme_options_do_not_overflow(text):
    THRESHOLDS.build(text).check(4)
    assert not any(math.isnan(k) for k in _along(text, 3))


@pytest.mark.parametrize("name", THRESHOLDS.names())
def test_text_in_place_of_a_number_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        THRESHOLDS.build(f"{name}(many)")
    assert caught.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "step(0)",
        "step(inf)",
        "linear(nan)",
        "exponential(-1)",
        "sigmoid(5, 0)",
        "sigmoid(-1, 1)",
        "noise(ratio=0)",
        "noise(decay=1)",
        "noise(warmup=0)",
    ],
)
def test_options_out_of_range_are_refused_with_a_fix(text):
    with pytest.raises(ConfigError, match="but must be") as caught:
        THRESHOLDS.build(text)
    assert caught.value.fix


# A user's function ------------------------------------------------------------------------------


def test_a_function_that_the_user_did_not_name_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "a_trap.py").write_text("from pathlib import Path; Path('marker').touch()\ngrow = abs\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    text = "smooth-switch(threshold=function(a_trap:grow))"
    with pytest.raises(ConfigError, match="it is not imported") as caught:
        POLICIES.build(text).resolved().check(FOUR)
    assert "echelon --allow a_trap:grow" in str(caught.value.fix)
    assert not (tmp_path / "marker").exists()
    monkeypatch.setenv("ECHELON_ALLOW", "a_trap:grow")
    POLICIES.build(text).resolved().check(FOUR)
    assert (tmp_path / "marker").exists()
    sys.modules.pop("a_trap")


def test_a_users_function_gives_k(function):
    policy = POLICIES.build(f"smooth-switch(threshold={function(lambda n: 1 + n * n)})")
    policy.check(FOUR)
    rule = policy.rule(FOUR)
    grown = []
    for step in range(3):
        rule.arrive(Arrival(worker=0, step=step, t=0.0))
        grown.append(rule.state()["K"])
    assert grown == [2, 4, 4]


@pytest.mark.parametrize(
    ("call", "gradient"),
    [
        (lambda n: 10 - n, 1),
        (lambda n: 3 if n < 700 else 2, 700),
        (lambda n: n if n < 123_456 else 5, 123_456),
    ],
)
def test_a_function_that_decreases_is_refused_and_the_point_is_named(function, call, gradient):
    policy = POLICIES.build(f"smooth-switch(threshold={function(call)})")
    with pytest.raises(ConfigError, match=f"decreases from .* at gradient {gradient}\\n") as caught:
        policy.check(FOUR)
    assert caught.value.fix


def test_a_decrease_between_the_checked_points_is_reported_in_training(function):
    text = function(lambda n: 2 if n == 5_003 else 3)
    THRESHOLDS.build(text).check(4)
    growth = THRESHOLDS.build(text).growth(4)
    for _ in range(5_002):
        growth.after(_gradient())
    with pytest.raises(ConfigError, match="decreases from 3 to 2 at gradient 5003"):
        growth.after(_gradient())


def test_a_function_may_overflow_once_it_has_reached_all_workers(function):
    text = function(lambda n: math.exp(n / 100))
    THRESHOLDS.build(text).check(4)
    assert _along(text, 200_000)[-1] >= 4


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda n: math.nan, "no number after 0 gradients"),
        (lambda n: "many", "failed for 0 gradients"),
        (lambda n: 1 / (3 - n) + 9, "failed for 3 gradients: ZeroDivisionError"),
        (lambda: 3, "failed for 0 gradients: TypeError"),
    ],
)
def test_a_function_that_gives_no_number_is_refused_before_training(function, call, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        THRESHOLDS.build(function(call)).check(4)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("grow", "is not of the form module:name"),
        ("a:b:c", "is not of the form module:name"),
        (":grow", "is not of the form module:name"),
        ("no_such_module_here:grow", "cannot be imported: ModuleNotFoundError"),
        ("math:grow", "cannot be imported: AttributeError"),
        ("math:pi", "is not a function but of type float"),
    ],
)
def test_a_target_that_is_not_a_function_is_refused_at_once(target, reason):
    allow_names_in(f"function({target})")
    with pytest.raises(ConfigError, match=reason) as caught:
        THRESHOLDS.build(f"function({target})")
    assert caught.value.fix


@pytest.mark.parametrize("name", THRESHOLDS.names())
def test_a_threshold_has_a_help_line(name):
    assert (THRESHOLDS.get(name).__doc__ or "").partition("\n")[0].endswith(".")
    assert issubclass(THRESHOLDS.get(name), Curve) or name == "noise"


# Measured noise ---------------------------------------------------------------------------------


def _drawn(rng, signal, noise, dimensions=200):
    """Gradients with |G|^2 = signal and tr S = noise, as arrivals with their squares and products."""
    mean, deviation = math.sqrt(signal / dimensions), math.sqrt(noise / dimensions)
    before = None
    while True:
        g = [rng.gauss(mean, deviation) for _ in range(dimensions)]
        dot = sum(a * b for a, b in zip(g, before, strict=True)) if before is not None else 0.0
        before = g
        yield _gradient(sum(a * a for a in g), dot)


@pytest.mark.parametrize(("ratio", "low", "high"), [(1, 7, 14), (0.5, 3, 7)])
def test_k_is_the_measured_noise_scale_times_the_ratio(ratio, low, high):
    growth = THRESHOLDS.build(f"noise(ratio={ratio}, warmup=200)").growth(100)
    gradients = _drawn(random.Random(7), signal=1.0, noise=9.0)
    for _ in range(300):
        k = growth.after(next(gradients))
    assert low <= k <= high


def test_gradients_without_noise_stay_asynchronous():
    growth = THRESHOLDS.build("noise(warmup=5)").growth(8)
    assert [growth.after(_gradient(4.0, 4.0)) for _ in range(50)] == [1.0] * 50


def test_k_stays_one_during_the_warmup():
    growth = THRESHOLDS.build("noise(warmup=10)").growth(8)
    assert [growth.after(_gradient(8.5, 1.0)) for _ in range(10)] == [1.0] * 10
    assert growth.after(_gradient(8.5, 1.0)) == 8


def test_k_never_decreases_when_noise_does():
    growth = THRESHOLDS.build("noise(warmup=1, decay=0)").growth(8)
    assert [growth.after(_gradient(square, 1.0)) for square in (4, 4, 9, 2)] == [1, 3, 8, 8]


def test_if_noise_hides_the_gradient_k_is_all_workers():
    rule = POLICIES.build("smooth-switch(threshold=noise(warmup=1))").rule(FOUR)
    for step in range(3):
        rule.arrive(Arrival(worker=0, step=step, t=0.0, square=1.0, dot=-0.5))
    assert rule.state()["K"] == 4


def test_a_gradient_that_overflowed_is_not_counted():
    growth = THRESHOLDS.build("noise(warmup=1)").growth(8)
    for square, dot in ((1, 0), (3, 1), (math.inf, math.nan), (3, 1)):
        k = growth.after(_gradient(square, dot))
    assert k == 2
