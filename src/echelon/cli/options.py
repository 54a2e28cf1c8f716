"""Turns a settings class into command-line options, so that each is described in one place only."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from echelon.config.registry import type_text
from echelon.config.resolve import Resolved, resolve
from echelon.config.schema import RunSettings
from echelon.errors import ConfigError


def with_settings(
    schema: type[RunSettings], panels: typing.Mapping[str, str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate `command(resolved, ...)`: its options are the settings of `schema` and `--config`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for name, p in inspect.signature(command).parameters.items() if name != "resolved"]
        names = [field.name for field in dataclasses.fields(schema)]

        def called(**given: Any) -> None:
            file: Path | None = given.pop("config")
            asked = {name: given.pop(name) for name in names}
            resolved: Resolved[RunSettings] = resolve(schema, asked, file)
            try:
                command(resolved, **given)
            except ConfigError as error:
                error.where = resolved.place(error.where)
                raise

        parameters = [*own, *_options(schema, panels), _config_option()]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        called.__doc__ = command.__doc__
        called.__name__ = command.__name__
        return called

    return decorate


def _options(schema: type[RunSettings], panels: typing.Mapping[str, str]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(schema)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None,
                "--" + field.name.replace("_", "-"),
                help=_help(field),
                metavar=type_text(_plain(hints[field.name])).upper().replace(" ", ""),
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
            help="A TOML file of settings. Default: ./echelon.toml if it is there.",
            show_default=False,
        ),
        annotation=Path | None,
    )


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    if field.default is None:
        return text
    default = f"{field.default:g}" if isinstance(field.default, float) else field.default
    return f"{text} Default: {default}."


def _plain(hint: Any) -> Any:
    """The type without the None of an optional one."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _click_type(hint: Any) -> Any:
    """The type that the command line reads; choices stay text, the resolver knows them."""
    plain = _plain(hint)
    return str if typing.get_origin(plain) is typing.Literal else plain
