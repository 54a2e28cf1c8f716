"""`echelon config show`: every setting, its value, and its origin."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cli.command import PlainCommand, PlainGroup
from echelon.config.resolve import resolve
from echelon.config.schema import TrainSettings, section_of
from echelon.errors import ConfigError

app = typer.Typer(cls=PlainGroup, help="Show settings and where they come from.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Show settings and where they come from."""


@app.command(cls=PlainCommand)
def show(
    config: Path | None = typer.Option(
        None, "--config", help="A TOML file of settings. Default: ./echelon.toml if it exists."
    ),
    assign: list[str] | None = typer.Option(
        None,
        "--set",
        metavar="NAME=VALUE",
        help="Set a value as an option of the command line would: --set epochs=5. May be repeated.",
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print each setting of `run` and `train`, its value, and where it came from.

    A command-line option overrides the TOML file; the file overrides the default.

    Examples:
      echelon config show
      echelon config show --config echelon.toml --set epochs=5
    """
    resolved = resolve(TrainSettings, dict(_assigned(text) for text in assign or []), config)
    values = dataclasses.asdict(resolved.settings)
    if json:
        rows = {name: {"value": value, "from": resolved.origins[name]} for name, value in values.items()}
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return
    table = Table("setting", "value", "from", box=None, pad_edge=False, header_style="bold")
    for name, value in values.items():
        shown = "-" if value is None else str(value)
        table.add_row(f"{section_of(name)}.{name}", Text(shown), Text(resolved.origins[name]))
    Console().print(table)


def _assigned(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"{text!r} sets nothing", where="--set", fix="write --set name=value")
    table, _, key = name.strip().replace("-", "_").rpartition(".")
    if table and table != section_of(key):
        raise ConfigError(
            f"{key!r} is not in [{table}]",
            where="--set",
            fix=f"write --set {section_of(key)}.{key}={value}",
        )
    hint = {field.name: str(field.type) for field in dataclasses.fields(TrainSettings)}.get(key, "")
    if hint.startswith(("str", "Literal")):
        return key, value
    for read in (int, float):
        try:
            return key, read(value)
        except ValueError:
            continue
    return key, value
