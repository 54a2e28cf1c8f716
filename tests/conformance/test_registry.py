"""Every registered strategy of every kind against the contract that they all have in common.

A new strategy is covered by being in its kind's package, a new kind by being in `KINDS`; that no kind is
forgotten there is tested too.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import subprocess
import sys

import msgspec
import pytest

import echelon
from echelon.cli.listing import KINDS
from echelon.config.call import Call, parse_call
from echelon.config.registry import Registry, options_of
from echelon.errors import ConfigError, UnknownName
from strategies import Registered, of_every_kind, registered

_KEBAB = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


def _call_of(strategy: object, name: str) -> Call:
    """The call that builds exactly this object, with all options."""
    options = {field.name: getattr(strategy, field.name) for field in dataclasses.fields(strategy)}
    return Call(name, (), msgspec.to_builtins(options))


@of_every_kind
def test_strategy_is_registered_under_its_kebab_case_name(entry: Registered) -> None:
    assert _KEBAB.fullmatch(entry.name)
    assert entry.strategy.name == entry.name


@of_every_kind
def test_strategy_is_a_frozen_dataclass_with_keyword_options(entry: Registered) -> None:
    kind = entry.strategy
    assert dataclasses.is_dataclass(kind)
    assert kind.__dataclass_params__.frozen
    assert all(field.kw_only for field in dataclasses.fields(kind))
    built = entry.build()
    assert built == entry.build()
    assert hash(built) == hash(entry.build())
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(built, field.name, None)


@of_every_kind
def test_strategy_has_its_own_help_line(entry: Registered) -> None:
    kind = entry.strategy
    assert kind.__doc__, "no docstring"
    help_line = (inspect.getdoc(kind) or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z0-9].{10,110}\.", help_line), help_line
    assert not help_line.startswith(f"{kind.__name__}("), "the docstring that dataclass makes up"
    assert help_line != (inspect.getdoc(entry.registry.contract) or "").partition("\n")[0]


@of_every_kind
def test_help_lines_are_not_shared(entry: Registered) -> None:
    described = entry.registry.describe()
    mine = next(one for one in described if one.name == entry.name)
    assert [one.name for one in described if one.help == mine.help] == [entry.name]
    assert mine.problem == ""


@of_every_kind
def test_options_have_snake_case_names_types_and_json_defaults(
    entry: Registered,
) -> None:
    for option in options_of(entry.strategy):
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", option.name)
        assert option.type
        assert json.loads(json.dumps(option.default)) == option.default


@of_every_kind
def test_strategy_can_be_built_without_options_or_names_the_required_option(
    entry: Registered,
) -> None:
    required = [option.name for option in options_of(entry.strategy) if option.required]
    if not required:
        built = entry.registry.build(entry.name)
        assert isinstance(built, entry.registry.contract)
        return
    with pytest.raises(ConfigError, match=f"'{required[0]}' is missing"):
        entry.registry.build(entry.name)
    assert isinstance(entry.build(), entry.registry.contract)


@of_every_kind
def test_printed_strategy_builds_an_equal_strategy(entry: Registered) -> None:
    for built in entry.builds():
        text = str(_call_of(built, entry.name))
        assert entry.registry.build(text) == built, text
        assert str(parse_call(text)) == text


@of_every_kind
def test_unknown_option_is_refused_by_name(entry: Registered) -> None:
    call = _call_of(entry.build(), entry.name)
    with pytest.raises(UnknownName, match="unknown option 'no_such_option'"):
        entry.registry.build(Call(call.name, (), {**call.options, "no_such_option": 1}))


@of_every_kind
def test_too_many_values_are_refused(entry: Registered) -> None:
    count = len(dataclasses.fields(entry.strategy))
    with pytest.raises(ConfigError, match=f"takes at most {count}"):
        entry.registry.build(Call(entry.name, (1,) * (count + 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_listed_under_its_own_name_and_has_strategies(kind: str) -> None:
    assert KINDS[kind].kind == kind
    assert _KEBAB.fullmatch(kind)
    assert KINDS[kind].names() == sorted(KINDS[kind].names()) != []
    assert {one.name for one in registered(kind)} == set(KINDS[kind].names())


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_of_a_kind_holds_strategies_and_no_two_share_a_name(kind: str) -> None:
    registry = KINDS[kind]
    package = importlib.import_module(registry.package)
    for info in pkgutil.iter_modules(package.__path__, prefix=registry.package + "."):
        own = [
            value
            for value in vars(importlib.import_module(info.name)).values()
            if inspect.isclass(value)
            and value.__module__ == info.name
            and issubclass(value, registry.contract)
            and not inspect.isabstract(value)
        ]
        assert own, f"{info.name} holds no {kind}"
        for value in own:
            assert registry.get(value.name) is value


def test_every_registry_can_be_listed() -> None:
    found: dict[str, Registry] = {}
    for info in pkgutil.walk_packages(echelon.__path__, prefix="echelon."):
        if info.name != "echelon.__main__":
            values = vars(importlib.import_module(info.name)).values()
            found |= {value.kind: value for value in values if isinstance(value, Registry)}
    assert found == KINDS


def test_strategies_are_found_and_built_without_importing_torch() -> None:
    program = (
        "import sys\n"
        f"sys.path.append({str(sys.modules['strategies'].__file__).rpartition('/')[0]!r})\n"
        "from strategies import registered\n"
        "for one in registered():\n"
        "    one.build()\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{one} imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
