"""`echelon list`: the strategies of a kind, with their options."""

from __future__ import annotations

from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.cluster.delay import DELAYS
from echelon.cluster.lab.spec import shipped_labs
from echelon.codec.codec import CODECS
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.config.registry import Description, Registry
from echelon.errors import UnknownName
from echelon.sync.detector import DETECTORS
from echelon.sync.graph import GRAPHS
from echelon.sync.policy import POLICIES
from echelon.sync.threshold import THRESHOLDS
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

KINDS: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (MODELS, DATASETS, POLICIES, COLLECTIVES, CODECS, DELAYS, DETECTORS, THRESHOLDS, GRAPHS)
}


def show(
    kind: str | None = typer.Argument(
        None, metavar="KIND", help=f"What to list: {', '.join(KINDS)} or lab. Without it, all names."
    ),
    json: bool = typer.Option(False, "--json", help="As JSON."),
) -> None:
    """List what can be chosen by name, with its options.

    A choice is written with its options: --model "mlp(width=256, depth=4)".

    Examples:
      echelon list
      echelon list model
      echelon list data --json
    """
    if kind is None:
        kinds = {name: KINDS[name].names() for name in KINDS} | {"lab": shipped_labs()}
        _print_json(kinds) if json else _print_kinds(kinds)
        return
    if kind == "lab":
        _print_json(shipped_labs()) if json else _print_kinds({"lab": shipped_labs()})
        return
    if kind not in KINDS:
        raise UnknownName("kind", kind, [*KINDS, "lab"], where="echelon list")
    described = KINDS[kind].describe()
    _print_json(described) if json else _print_table(kind, described)


def _print_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _print_kinds(kinds: dict[str, list[str]]) -> None:
    table = Table("kind", "names", box=None, pad_edge=False, header_style="bold")
    for kind, names in kinds.items():
        table.add_row(kind, ", ".join(names))
    Console().print(table)


def _print_table(kind: str, described: list[Description]) -> None:
    table = Table(kind, "options", "what it is", box=None, pad_edge=False, header_style="bold")
    for one in described:
        options = "\n".join(
            f"{o.name}: {o.type}" if o.required else f"{o.name}={_shown(o.default)}" for o in one.options
        )
        origin = "" if one.origin == "echelon" else f" ({one.origin})"
        table.add_row(one.name, Text(options), Text(one.problem or one.help + origin))
    Console().print(table)


def _shown(value: Any) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
