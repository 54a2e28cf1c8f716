"""Finds the strategies of one kind by name: one file each, ours and third parties'.

A strategy is a frozen, keyword-only dataclass that implements its kind's contract. Its fields are its
options, `name` is the name that users write, and the first line of its docstring is its help. Every file
in the kind's package is found; other distributions add theirs under the entry-point group
`echelon.<kind>`. Strategy files import torch inside their methods, not at the top, so that
listing them is quick.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import typing
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from echelon.config.allowed import check_allowed
from echelon.config.call import Call, Value, parse_call
from echelon.errors import ConfigError, UnknownName, nearest


class Strategy(ABC):
    """Base of every contract whose implementations users choose by name."""

    __slots__ = ()
    name: ClassVar[str]


S = TypeVar("S", bound=Strategy)

_END_OF_INTEGERS = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a strategy, as `echelon list` shows it."""

    name: str
    type: str
    default: Any
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A strategy as `echelon list` shows it. `problem` says why a third-party strategy cannot be used."""

    name: str
    help: str
    options: tuple[Option, ...] = ()
    origin: str = "echelon"
    problem: str = ""


class Registry(Generic[S]):
    """The strategies of one kind, found on disk once."""

    def __init__(self, kind: str, contract: type[S], package: str) -> None:
        self.kind = kind
        self.contract = contract
        self.package = package

    @cached_property
    def _own(self) -> dict[str, type[S]]:
        found: dict[str, type[S]] = {}
        package = importlib.import_module(self.package)
        for info in pkgutil.iter_modules(package.__path__, prefix=self.package + "."):
            module = importlib.import_module(info.name)
            for value in vars(module).values():
                if self._is_strategy(value) and value.__module__ == info.name:
                    found[value.name] = value
        return found

    @cached_property
    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        return {e.name: e for e in importlib.metadata.entry_points(group=f"echelon.{self.kind}")}

    def _is_strategy(self, value: object) -> bool:
        return (
            inspect.isclass(value)
            and issubclass(value, self.contract)
            and not inspect.isabstract(value)
            and isinstance(getattr(value, "name", None), str)
        )

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self._own, *self._entry_points})

    def get(self, name: str, *, where: str = "") -> type[S]:
        """The strategy of that name; UnknownName names the nearest one.

        A strategy of another distribution is imported only if the user named it: see allowed.py.
        """
        if name not in self._own and name in self._entry_points:
            check_allowed(name, f"{self.kind} {name!r}", where=where or f"{self.kind} {name}")
        return self._get(name, where=where)

    def _get(self, name: str, *, where: str = "") -> type[S]:
        if name in self._own:
            return self._own[name]
        if name in self._entry_points:
            return self._load(self._entry_points[name])
        raise UnknownName(self.kind, name, self.names(), where=where)

    def _load(self, entry: importlib.metadata.EntryPoint) -> type[S]:
        origin = entry.dist.name if entry.dist else entry.value
        try:
            value = entry.load()
        except Exception as error:
            raise ConfigError(
                f"{self.kind} {entry.name!r} of {origin} cannot be imported: {error}",
                where=f"entry point {entry.value}",
                fix=f"repair or uninstall {origin}",
            ) from error
        if not self._is_strategy(value):
            raise ConfigError(
                f"{self.kind} {entry.name!r} of {origin} does not implement {self.contract.__name__}",
                where=f"entry point {entry.value}",
                fix=f"derive it from {self.contract.__module__}.{self.contract.__name__}",
            )
        try:
            options_of(value)
        except Exception as error:
            raise ConfigError(
                f"{self.kind} {entry.name!r} of {origin} has options that cannot be read: {error}",
                where=f"entry point {entry.value}",
                fix="make it a frozen, keyword-only dataclass whose fields have plain types",
            ) from error
        return typing.cast("type[S]", value)

    def build(self, text: str | Call, *, where: str = "") -> S:
        """Build the strategy that `name(option=value, ...)` names, with its options checked."""
        call = parse_call(text) if isinstance(text, str) else text
        kind = self.get(call.name, where=where)
        place = where or f"{self.kind} {call.name}"
        return build_options(kind, _by_name(kind, call, place), where=place)

    def describe(self) -> list[Description]:
        """Every strategy with its help and options; a broken third-party strategy with its problem."""
        out = []
        for name in self.names():
            entry = self._entry_points.get(name) if name not in self._own else None
            origin = entry.dist.name if entry and entry.dist else "echelon"
            try:
                kind = self._get(name)
            except ConfigError as error:
                out.append(Description(name=name, help="", origin=origin, problem=error.message))
                continue
            help_line = (inspect.getdoc(kind) or "").partition("\n")[0]
            out.append(Description(name=name, help=help_line, options=options_of(kind), origin=origin))
        return out


def options_of(kind: type[Any]) -> tuple[Option, ...]:
    """The fields of a strategy's dataclass as options."""
    hints = typing.get_type_hints(kind)
    out = []
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        out.append(
            Option(
                name=field.name,
                type=type_text(hints[field.name]),
                default=default,
                required=required,
            )
        )
    return tuple(out)


def type_text(hint: Any) -> str:
    """A type as users read it: `int`, `str | None`, `mean | sum`."""
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(str(choice) for choice in typing.get_args(hint))
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__ if hint is not type(None) else "none"
    args = typing.get_args(hint)
    if args and typing.get_origin(hint) not in (list, tuple, dict):
        return " | ".join(type_text(arg) for arg in args)
    return str(hint).replace("typing.", "")


def _by_name(kind: type[Any], call: Call, where: str) -> dict[str, Value]:
    """All arguments by name; positional ones take the options' names in order."""
    names = [field.name for field in dataclasses.fields(kind)]
    if len(call.args) > len(names):
        takes = ", ".join(names) if names else "none"
        raise ConfigError(
            f"{call.name} was given {len(call.args)} values, it takes at most {len(names)}",
            where=where,
            fix=f"its options in order: {takes}",
        )
    given = dict(zip(names, call.args, strict=False))
    twice = [name for name in given if name in call.options]
    if twice:
        raise ConfigError(
            f"option {twice[0]!r} is given twice, by position and by name",
            where=where,
            fix="give it once",
        )
    return given | dict(call.options)


T = TypeVar("T")


def build_options(kind: type[T], given: Mapping[str, Any], *, where: str) -> T:
    """A dataclass from a mapping; every unknown key, missing key or wrong type is a ConfigError."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in given.items():
        if key not in fields:
            raise UnknownName("option", key, fields, where=where)
        values[key] = convert(value, hints[key], where=f"{where}, {key}")
    missing = [option.name for option in options_of(kind) if option.required]
    missing = [name for name in missing if name not in values]
    if missing:
        raise ConfigError(f"{missing[0]!r} is missing", where=where, fix=f"add {missing[0]}=...")
    try:
        return kind(**values)
    except ConfigError as error:  # the strategy says what is wrong, the caller where
        error.where = f"{where}: {error.where}" if error.where and error.where != where else where
        raise


def convert(value: Any, hint: Any, *, where: str) -> Any:
    """Convert a value to a type: whole floats to ints, ints to floats; text is never converted."""
    try:
        return _within_range(msgspec.convert(value, hint, strict=True), where)
    except msgspec.ValidationError as error:
        if isinstance(value, float) and value.is_integer():
            with contextlib.suppress(msgspec.ValidationError):
                return _within_range(msgspec.convert(int(value), hint, strict=True), where)
        reason = re.sub(r"`(\w+)`", r"\1", str(error))
        raise ConfigError(
            f"{value!r} does not fit: {reason[0].lower() + reason[1:]}",
            where=where,
            fix=_nearest(value, hint) + f"give {type_text(hint)}",
        ) from None


def _within_range(value: Any, where: str) -> Any:
    """Refuse a whole number that no tensor, file or message can hold."""
    if isinstance(value, int) and abs(value) >= _END_OF_INTEGERS:
        raise ConfigError(
            f"{str(value)[:20]}... is too large a whole number", where=where, fix="give a smaller one"
        )
    return value


def _nearest(value: Any, hint: Any) -> str:
    """A question with the nearest of the words that `hint` allows; empty if none is near."""
    close = nearest(str(value), [word for word in typing.get_args(hint) if isinstance(word, str)])
    return f"did you mean {close!r}? " if close else ""
