"""Every registered collective, built-in or third-party, against the contract, and its errors for wrong
options. tests/property/test_collectives.py tests that they sum.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest

from echelon.comm.schedule.collective import COLLECTIVES, Collective
from echelon.config.registry import options_of
from echelon.errors import ConfigError, UnknownName

every_collective = pytest.mark.parametrize("name", COLLECTIVES.names())
with_options = pytest.mark.parametrize(
    "name", [name for name in COLLECTIVES.names() if options_of(COLLECTIVES.get(name))]
)


def test_all_built_in_collectives_are_registered():
    built_in = {"direct", "ring", "halving-doubling", "butterfly", "binary-blocks", "hierarchical", "ps"}
    assert built_in <= set(COLLECTIVES.names())


@every_collective
def test_collective_has_a_help_line_of_its_own(name):
    kind = COLLECTIVES.get(name)
    help_line = (inspect.getdoc(kind) or "").partition("\n")[0]
    assert help_line.endswith(".")
    assert help_line != (inspect.getdoc(Collective) or "").partition("\n")[0]
    assert kind.name == name


@every_collective
def test_collective_is_a_frozen_value_that_can_be_a_key(name):
    collective = COLLECTIVES.build(name)
    assert collective == COLLECTIVES.build(name)
    assert hash(collective) == hash(COLLECTIVES.build(name))
    for field in dataclasses.fields(collective):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(collective, field.name, None)


@every_collective
def test_schedules_are_deterministic(name):
    collective = COLLECTIVES.build(name)
    assert collective.schedule(2, 5, 23) == collective.schedule(2, 5, 23)
    collective.schedule(2, 5, 23).clear()  # a caller may change its copy
    assert collective.schedule(2, 5, 23)


@every_collective
def test_collective_with_default_options_serves_any_number_of_workers(name):
    for size in range(1, 18):
        COLLECTIVES.build(name).check(size)


@with_options
def test_misspelled_option_names_the_nearest_one(name):
    option = options_of(COLLECTIVES.get(name))[0].name
    with pytest.raises(UnknownName) as caught:
        COLLECTIVES.build(f"{name}({option}x=1)")
    assert caught.value.nearest == option


@with_options
def test_text_in_place_of_a_number_is_refused(name):
    for option in options_of(COLLECTIVES.get(name)):
        if option.type == "int":
            with pytest.raises(ConfigError, match="does not fit") as caught:
                COLLECTIVES.build(f"{name}({option.name}=many)")
            assert option.name in caught.value.where


def test_misspelled_collective_names_the_nearest_one():
    with pytest.raises(UnknownName) as caught:
        COLLECTIVES.build("halvingdoubling")
    assert caught.value.nearest == "halving-doubling"


@pytest.mark.parametrize("level", ["inner", "outer"])
def test_unknown_collective_of_a_level_is_refused_at_once_and_names_the_nearest_one(level):
    with pytest.raises(UnknownName) as caught:
        COLLECTIVES.build(f"hierarchical({level}=rnig)")
    assert caught.value.nearest == "ring"
    assert level in caught.value.where


def test_wrong_option_deep_inside_a_hierarchy_is_refused_at_once():
    with pytest.raises(ConfigError, match="0 servers") as caught:
        COLLECTIVES.build('hierarchical(outer="hierarchical(inner=ps(servers=0))")')
    assert "outer" in caught.value.where
    assert "inner" in caught.value.where


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("hierarchical(group=-1)", "-1 workers"),
        ("hierarchical(sizes=[])", "sizes cannot be"),
        ("hierarchical(sizes=[4, 0])", "sizes cannot be"),
        ("hierarchical(sizes=[4, x])", "does not fit"),
        ("hierarchical(sizes=[4, 4], group=4)", "both group and sizes"),
        ("hierarchical(rails=perhaps)", "does not fit"),
        ("ps(servers=0)", "0 servers"),
        ("ps(servers=-2)", "-2 servers"),
    ],
)
def test_meaningless_options_are_refused_at_once_with_a_fix(text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        COLLECTIVES.build(text)
    assert caught.value.where
    assert caught.value.fix


@pytest.mark.parametrize(
    ("text", "size", "reason"),
    [
        ("hierarchical(sizes=[4, 4])", 7, "8 workers, but there are 7"),
        ("hierarchical(sizes=[4, 4])", 9, "8 workers, but there are 9"),
        ("ps(servers=4)", 3, "4 servers, but its group has 3 workers"),
        ("ps(servers=2)", 1, "2 servers, but its group has 1 worker"),
        ("hierarchical(group=2, outer=ps(servers=4))", 6, "4 servers, but its group has 3 workers"),
        ("hierarchical(sizes=[3, 2], inner=ps(servers=3))", 5, "3 servers, but its group has 2 workers"),
        ("hierarchical(outer=hierarchical(sizes=[3]))", 4, "3 workers, but there are 2"),
    ],
)
def test_options_that_do_not_fit_the_number_of_workers_are_refused_on_every_rank(text, size, reason):
    collective = COLLECTIVES.build(text)
    for rank in range(size):
        with pytest.raises(ConfigError) as caught:
            collective.schedule(rank, size, 10)
        assert caught.value.fix
        assert caught.match(reason)
    with pytest.raises(ConfigError, match=reason):
        collective.check(size)


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        ("hierarchical", 1, [1]),
        ("hierarchical", 4, [2, 2]),
        ("hierarchical", 5, [3, 2]),
        ("hierarchical", 8, [4, 4]),
        ("hierarchical", 11, [4, 4, 3]),
        ("hierarchical", 12, [4, 4, 4]),
        ("hierarchical", 16, [4, 4, 4, 4]),
        ("hierarchical", 17, [5, 4, 4, 4]),
        ("hierarchical(group=4)", 12, [4, 4, 4]),
        ("hierarchical(group=4)", 10, [4, 4, 2]),
        ("hierarchical(group=4)", 3, [3]),
        ("hierarchical(sizes=[4, 4, 3, 3])", 14, [4, 4, 3, 3]),
    ],
)
def test_workers_are_grouped_as_requested(text, size, expected):
    assert COLLECTIVES.build(text).group_sizes(size) == expected


def test_listing_collectives_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from echelon.comm.schedule.collective import COLLECTIVES; COLLECTIVES.describe(); "
        "import echelon.comm.schedule.cost, echelon.comm.schedule.spread; "
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
