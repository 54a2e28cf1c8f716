"""Every registered strategy as a test parameter, so that a new one is tested by being added.

    @each("delay")
    def test_no_pause_is_negative(entry):
        delay = entry.build()

`@of_every_kind` runs a quick test for all strategies, one kind in one go. Kinds are those that
`echelon list` knows.
"""

from __future__ import annotations

import itertools
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from echelon.cli.listing import KINDS
from echelon.config.allowed import allow_names_in
from echelon.config.call import Call
from echelon.config.registry import Registry, Strategy, options_of
from echelon.errors import ConfigError

# What to try for an option without a default, by its type; the first combination that is accepted counts.
_TRIED: dict[Any, tuple[Any, ...]] = {
    bool: (False, True),
    int: (1, 2, 8),
    float: (0.25, 1.0, 3.0),
    str: ("somewhere", "1", "math:sqrt"),
}


allow_names_in(*(f"x({value})" for value in _TRIED[str]))


@dataclass(frozen=True)
class Registered:
    """One strategy of one kind."""

    registry: Registry[Any]
    name: str

    @property
    def strategy(self) -> type[Strategy]:
        """Its class."""
        return self.registry.get(self.name)

    def builds(self) -> Iterator[Strategy]:
        """The strategy with its defaults and whatever values its required options accept, if any."""
        hints = typing.get_type_hints(self.strategy)
        required = [option.name for option in options_of(self.strategy) if option.required]
        for values in itertools.product(*(_values(hints[name]) for name in required)):
            try:
                yield self.registry.build(Call(self.name, (), dict(zip(required, values, strict=True))))
            except ConfigError:
                continue

    def build(self) -> Strategy:
        """The first of them."""
        for built in self.builds():
            return built
        raise AssertionError(f"{self.registry.kind} {self.name}: no values found that its options accept")

    def __str__(self) -> str:
        return f"{self.registry.kind}-{self.name}"


def _values(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    for choice in (hint, *typing.get_args(hint)):
        if choice in _TRIED:
            return _TRIED[choice]
    raise AssertionError(f"no values to try for {hint}: add some to tests/strategies.py")


def registered(*kinds: str) -> list[Registered]:
    """All strategies of these kinds; of all kinds, if none is named."""
    return [Registered(KINDS[kind], name) for kind in kinds or tuple(KINDS) for name in KINDS[kind].names()]


def of_every_kind(check: Callable[[Registered], None]) -> Callable[[str], None]:
    """Make one test for each kind of a check of one strategy; a failure names the strategy."""

    def test(kind: str) -> None:
        for entry in registered(kind):
            try:
                check(entry)
            except BaseException as error:
                error.add_note(f"strategy: {entry}")
                raise

    test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
    return pytest.mark.parametrize("kind", KINDS)(test)


def each(*kinds: str) -> pytest.MarkDecorator:
    """Run a test once for each strategy of these kinds, which it takes as `entry`."""
    return pytest.mark.parametrize("entry", registered(*kinds), ids=str)
