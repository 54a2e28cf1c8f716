"""Every registered delay, built-in or third-party, against the contract. New ones are tested automatically.

Options come from a small grid of numbers; combinations that a delay refuses are skipped, but each delay
must accept some.
"""

import dataclasses
import inspect
import itertools
import random

import pytest

from echelon.cluster.delay import DELAYS, Delay
from echelon.config.registry import options_of
from echelon.errors import ConfigError

GRID = (0.0, 0.25, 0.5, 3.0)


def _accepted(name: str) -> list[Delay]:
    kind = DELAYS.get(name)
    out = []
    for values in itertools.product(GRID, repeat=len(dataclasses.fields(kind))):
        try:
            out.append(DELAYS.build(f"{name}({', '.join(map(str, values))})"))
        except ConfigError:
            continue
    assert out, f"{name} accepts no numbers of {GRID} as options"
    return out


def _draws(delay: Delay, seed: int, count: int) -> list[float]:
    rng = random.Random(seed)
    return [delay.sample(rng) for _ in range(count)]


every_delay = pytest.mark.parametrize("name", DELAYS.names())


def test_all_built_in_delays_are_registered():
    assert {"normal", "uniform", "exponential", "constant", "pareto", "sometimes"} <= set(DELAYS.names())


@every_delay
def test_no_pause_is_negative(name):
    for delay in _accepted(name):
        assert all(pause_s >= 0 for pause_s in _draws(delay, 1, 500)), delay


@every_delay
def test_same_seed_gives_the_same_pauses_and_leaves_the_global_generator_alone(name):
    before = random.getstate()
    for delay in _accepted(name):
        assert _draws(delay, 2, 50) == _draws(delay, 2, 50), delay
    assert random.getstate() == before


@every_delay
def test_two_workers_that_share_a_delay_draw_independent_pauses(name):
    for delay in _accepted(name):
        alone = _draws(delay, 3, 20)
        mine, other = random.Random(3), random.Random(4)
        interleaved = [(delay.sample(mine), delay.sample(other))[0] for _ in range(20)]
        assert interleaved == alone, delay


@every_delay
def test_delay_is_a_frozen_value(name):
    delay = _accepted(name)[-1]
    field = dataclasses.fields(delay)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(delay, field, 1.0)
    assert delay == _accepted(name)[-1]
    assert hash(delay) == hash(_accepted(name)[-1])


@every_delay
def test_a_delay_can_be_written_and_read_back(name):
    for delay in _accepted(name):
        options = ", ".join(f"{key}={value}" for key, value in dataclasses.asdict(delay).items())
        assert DELAYS.build(f"{name}({options})") == delay


@every_delay
def test_delay_has_a_help_line_of_its_own_and_typed_options(name):
    kind = DELAYS.get(name)
    help_line = (inspect.getdoc(kind) or "").partition("\n")[0]
    assert help_line.endswith(".")
    assert help_line != (inspect.getdoc(Delay) or "").partition("\n")[0]
    assert kind.name == name
    assert all(option.type == "float" for option in options_of(kind))


@every_delay
def test_misspelled_option_names_the_nearest_one(name):
    option = options_of(DELAYS.get(name))[0].name
    with pytest.raises(ConfigError, match="unknown option") as caught:
        DELAYS.build(f"{name}({option}x=1)")
    assert repr(option) in caught.value.fix


@every_delay
def test_text_as_option_is_refused(name):
    option = options_of(DELAYS.get(name))[0].name
    with pytest.raises(ConfigError, match="does not fit"):
        DELAYS.build(f"{name}({option}=soon)")
