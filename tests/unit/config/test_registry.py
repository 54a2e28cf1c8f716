"""Strategies are found by name, options are checked, and third-party errors are isolated."""

from __future__ import annotations

import importlib
import sys
from typing import Literal

import pytest

from echelon.config import allowed
from echelon.config.registry import Registry, Strategy, convert, type_text
from echelon.errors import ConfigError, UnknownName

CONTRACT = """
from abc import abstractmethod
from echelon.config.registry import Strategy

class Pace(Strategy):
    @abstractmethod
    def speed(self): ...
"""

STRATEGIES = '''
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Literal
from own_paces.contract import Pace

class Unfinished(Pace):
    name = "unfinished"

@dataclass(frozen=True, kw_only=True)
class Steady(Pace):
    """Goes on at one speed.

    More about it.
    """
    name = "steady"
    def speed(self): return 1.0

@dataclass(frozen=True, kw_only=True)
class Jumpy(Pace):
    """Now this, now that."""
    name = "jumpy"
    low: float
    high: float = 2.0
    how: Literal["up", "down"] = "up"
    steps: int = 10
    label: str | None = None
    marks: list[int] = field(default_factory=lambda: [1])
    def speed(self): return self.low
'''

THIRD_PARTY = '''
from dataclasses import dataclass
from own_paces.contract import Pace

@dataclass(frozen=True, kw_only=True)
class Borrowed(Pace):
    """From elsewhere."""
    name = "borrowed"
    factor: int = 2
    def speed(self): return self.factor

class Plain(Pace):
    """Not a dataclass."""
    name = "plain"
    def speed(self): return 0

@dataclass(frozen=True, kw_only=True)
class Puzzling(Pace):
    """Its option has an undefined type."""
    name = "puzzling"
    x: "Unheard" = None
    def speed(self): return 0

class Stranger:
    name = "stranger"
'''

ENTRY_POINTS = """
[echelon.pace]
borrowed = elsewhere:Borrowed
steady = elsewhere:Borrowed
missing = elsewhere:Missing
broken = elsewhere_broken:Anything
plain = elsewhere:Plain
puzzling = elsewhere:Puzzling
stranger = elsewhere:Stranger
"""


@pytest.fixture
def registry(tmp_path, monkeypatch):
    """A registry with two built-in strategies, and seven of a distribution, one of them valid."""
    package = tmp_path / "own_paces"
    (package / "kinds").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "contract.py").write_text(CONTRACT)
    (package / "kinds" / "__init__.py").touch()
    (package / "kinds" / "all.py").write_text(STRATEGIES)
    (tmp_path / "elsewhere.py").write_text(THIRD_PARTY)
    (tmp_path / "elsewhere_broken.py").write_text("1 / 0")
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ECHELON_ALLOW", "borrowed missing broken plain puzzling stranger")
    contract = importlib.import_module("own_paces.contract").Pace
    yield Registry("pace", contract, "own_paces.kinds")
    for name in [name for name in sys.modules if name.startswith(("own_paces", "elsewhere"))]:
        del sys.modules[name]


def test_strategy_in_the_package_is_found_without_registration(registry):
    assert registry.get("steady").__name__ == "Steady"
    assert registry.build("steady").speed() == 1.0


def test_names_are_sorted_and_exclude_abstract_classes(registry):
    assert registry.names() == sorted(
        ["borrowed", "broken", "jumpy", "missing", "plain", "puzzling", "stranger", "steady"]
    )


def test_options_can_be_given_by_name_and_by_position(registry):
    built = registry.build("jumpy(0.5, 3, how=down, label=x, marks=[1, 2])")
    assert (built.low, built.high, built.how, built.steps) == (0.5, 3.0, "down", 10)
    assert (built.label, built.marks) == ("x", [1, 2])
    assert isinstance(built.high, float)


def test_unknown_strategy_error_suggests_the_nearest_name(registry):
    with pytest.raises(UnknownName) as caught:
        registry.build("steddy", where="--pace")
    assert (caught.value.nearest, caught.value.where) == ("steady", "--pace")
    assert caught.value.message == "unknown pace 'steddy'"


def test_unknown_option_error_suggests_the_nearest_name(registry):
    with pytest.raises(UnknownName) as caught:
        registry.build("jumpy(1, hihg=2)")
    assert (caught.value.nearest, caught.value.where) == ("high", "pace jumpy")


@pytest.mark.parametrize(
    ("text", "message", "where", "fix"),
    [
        (
            "jumpy(low=fast)",
            "'fast' does not fit: expected float",
            "pace jumpy, low",
            "give float",
        ),
        (
            "jumpy(1, steps=2.5)",
            "2.5 does not fit: expected int",
            "pace jumpy, steps",
            "give int",
        ),
        (
            "jumpy(1, steps=true)",
            "True does not fit: expected int",
            "pace jumpy, steps",
            "give int",
        ),
        ("jumpy(1, how=left)", "'left' does not fit", "pace jumpy, how", "give up | down"),
        ("jumpy(1, label=3)", "3 does not fit", "pace jumpy, label", "give str | none"),
        ("jumpy(1, marks=[x])", "['x'] does not fit", "pace jumpy, marks", "give list[int]"),
        ("jumpy", "'low' is missing", "pace jumpy", "add low=..."),
        ("jumpy(1, low=2)", "option 'low' is given twice", "pace jumpy", "give it once"),
        ("steady(1)", "steady was given 1 values, it takes at most 0", "pace steady", "in order: none"),
        ("jumpy(1,2,3,4,5,6,7)", "it takes at most 6", "pace jumpy", "low, high, how, steps, label, marks"),
    ],
)
def test_invalid_options_are_named_with_place_and_fix(registry, text, message, where, fix):
    with pytest.raises(ConfigError) as caught:
        registry.build(text)
    assert message in caught.value.message
    assert caught.value.where == where
    assert fix in caught.value.fix


def test_whole_floats_are_accepted_as_ints_and_ints_as_floats(registry):
    built = registry.build("jumpy(1, steps=1e3)")
    assert (built.steps, type(built.steps)) == (1000, int)
    assert (built.low, type(built.low)) == (1.0, float)


def test_third_party_strategy_is_built_like_a_built_in_one(registry):
    assert registry.build("borrowed(factor=5)").speed() == 5


def test_built_in_strategy_wins_over_a_third_party_one_of_the_same_name(registry):
    assert registry.get("steady").__name__ == "Steady"
    assert {d.name: d.origin for d in registry.describe()}["steady"] == "echelon"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("broken", "cannot be imported: division by zero"),
        ("missing", "cannot be imported"),
        ("stranger", "does not implement Pace"),
        ("plain", "has options that cannot be read"),
        ("puzzling", "has options that cannot be read: name 'Unheard' is not defined"),
    ],
)
def test_broken_third_party_strategy_raises_an_error_naming_its_distribution(registry, name, problem):
    with pytest.raises(ConfigError) as caught:
        registry.build(name)
    assert problem in caught.value.message
    assert f"{name!r} of elsewhere" in caught.value.message
    assert "entry point elsewhere" in caught.value.where


def test_listing_shows_all_strategies_with_help_options_and_problems(registry):
    shown = {description.name: description for description in registry.describe()}
    assert list(shown) == registry.names()
    assert (shown["steady"].help, shown["steady"].options) == ("Goes on at one speed.", ())
    assert (shown["borrowed"].help, shown["borrowed"].origin) == ("From elsewhere.", "elsewhere")
    assert "division by zero" in shown["broken"].problem
    assert shown["broken"].origin == "elsewhere"
    assert [d.name for d in shown.values() if d.problem] == [
        "broken", "missing", "plain", "puzzling", "stranger"
    ]  # fmt: skip
    assert [(o.name, o.type, o.default, o.required) for o in shown["jumpy"].options] == [
        ("low", "float", None, True),
        ("high", "float", 2.0, False),
        ("how", "up | down", "up", False),
        ("steps", "int", 10, False),
        ("label", "str | none", None, False),
        ("marks", "list[int]", [1], False),
    ]


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (int, "int"),
        (str | None, "str | none"),
        (Literal["a", 1], "a | 1"),
        (list[int], "list[int]"),
        (dict[str, float] | None, "dict[str, float] | none"),
    ],
)
def test_types_are_shown_in_their_usual_form(hint, text):
    assert type_text(hint) == text


def test_text_is_never_converted_to_a_number():
    with pytest.raises(ConfigError, match="expected int, got str"):
        convert("3", int, where="here")


def test_strategy_base_class_has_empty_slots():
    assert Strategy.__slots__ == ()


def test_a_strategy_of_another_distribution_is_imported_only_if_the_user_named_it(registry, monkeypatch):
    monkeypatch.setenv("ECHELON_ALLOW", "")
    with pytest.raises(ConfigError, match="pace 'borrowed' is code outside of Echelon") as caught:
        registry.build("borrowed(factor=5)")
    assert "--allow borrowed" in str(caught.value.fix)
    assert "elsewhere" not in sys.modules
    monkeypatch.setattr(allowed, "_given", set())
    allowed.allow_names_in("levels(borrowed(factor=5))")
    assert registry.build("borrowed(factor=5)").speed() == 5
