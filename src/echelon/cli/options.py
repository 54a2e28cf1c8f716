"""Turns a settings class into command-line options, so that each is described in one place only."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import typer

from echelon.config.registry import convert, type_text
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunSettings
from echelon.errors import ConfigError

S_co = TypeVar("S_co", covariant=True)
Command = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Given(Generic[S_co]):
    """Settings from the command line alone, and the names of those that were given there."""

    settings: S_co
    names: tuple[str, ...]

    def values(self) -> dict[str, Any]:
        """The values that were given."""
        return {name: getattr(self.settings, name) for name in self.names}


def with_settings(schema: type[RunSettings], panels: Mapping[str, str]) -> Callable[[Command], Command]:
    """Decorate `command(resolved, ...)`: its options are the settings of `schema` and `--config`."""

    def decorate(command: Command) -> Command:
        def called(**given: Any) -> None:
            file: Path | None = given.pop("config")
            asked = {name: given.pop(name) for name in _names(schema)}
            resolved: Resolved[RunSettings] = resolve(schema, asked, file)
            try:
                command(resolved, **given)
            except ConfigError as error:
                error.where = resolved.place(error.where)
                raise

        options = [*_options(schema, panels), _config_option()]
        return _dressed(called, command, [*_own_parameters(command), *options])

    return decorate


def with_options(schema: type[Any], panels: Mapping[str, str]) -> Callable[[Command], Command]:
    """Decorate `command(given, ...)`: its options are the fields of `schema`; no file is read."""

    def decorate(command: Command) -> Command:
        def called(**given: Any) -> None:
            hints = typing.get_type_hints(schema)
            asked = {name: given.pop(name) for name in _names(schema)}
            values = {
                name: convert(value, hints[name], where=flag_of(name))
                for name, value in asked.items()
                if value not in (None, [])
            }
            command(Given(schema(**values), tuple(values)), **given)

        return _dressed(called, command, [*_options(schema, panels), *_own_parameters(command)])

    return decorate


def flag_of(name: str) -> str:
    """The option of a setting."""
    return "--" + name.replace("_", "-")


def _own_parameters(command: Command) -> list[inspect.Parameter]:
    """The parameters of `command` after the first, which takes the settings."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]


def _dressed(called: Command, command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """`called` with the name and help of `command`, and with these parameters."""
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__doc__ = command.__doc__
    called.__name__ = command.__name__
    return called


def _names(schema: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(schema)]


def _options(schema: type[Any], panels: Mapping[str, str]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(schema)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                flag_of(field.name),
                help=_help(field),
                metavar=field.metadata.get("metavar") or _metavar(hints[field.name]),
                show_default=False,
                rich_help_panel=panels.get(field.name),
            ),
            annotation=_click_type(hints[field.name]) | None,
        )
        for field in dataclasses.fields(schema)
    ]


def _config_option() -> inspect.Parameter:
    return inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            None,
            "--config",
            help="A TOML file of settings. Default: ./echelon.toml if it exists.",
            show_default=False,
        ),
        annotation=Path | None,
    )


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    default = field.default
    if default is None or default is False or default == ():
        return text
    if isinstance(default, tuple):
        default = ", ".join(default)
    return f"{text} Default: {f'{default:g}' if isinstance(default, float) else default}."


def _metavar(hint: Any) -> str | None:
    """The choices of a setting that has choices; otherwise typer shows the type."""
    plain = _plain(hint)
    return type_text(plain).replace(" ", "") if typing.get_origin(plain) is typing.Literal else None


def _plain(hint: Any) -> Any:
    """The type without the None of an optional one."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _click_type(hint: Any) -> Any:
    """The type that the command line reads. Choices are read as text: `convert` checks them."""
    plain = _plain(hint)
    if typing.get_origin(plain) is tuple:
        return list[str]
    return str if typing.get_origin(plain) is typing.Literal else plain
