"""`echelon list`: what can be chosen by name, with its options."""

from __future__ import annotations

from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.adapt.rule import RULES
from echelon.cluster.delay import DELAYS
from echelon.cluster.lab.spec import shipped_labs
from echelon.codec.codec import CODECS
from echelon.comm.schedule.collective import COLLECTIVES
from echelon.config.registry import Description, Registry
from echelon.data.source import SOURCES
from echelon.errors import UnknownName
from echelon.parallel.dimension import DIMENSIONS
from echelon.start.launcher import LAUNCHERS
from echelon.sync.detector import DETECTORS
from echelon.sync.graph import GRAPHS
from echelon.sync.policy import POLICIES
from echelon.sync.threshold import THRESHOLDS
from echelon.verify.verification import VERIFICATIONS
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

KINDS: dict[str, Registry[Any]] = {
    registry.kind: registry
    for registry in (
        MODELS,
        DATASETS,
        POLICIES,
        DIMENSIONS,
        COLLECTIVES,
        CODECS,
        DELAYS,
        DETECTORS,
        THRESHOLDS,
        GRAPHS,
        VERIFICATIONS,
        LAUNCHERS,
        SOURCES,
        RULES,
    )
}
_LAB = "lab"
_OTHER_NAMES = {
    **{f"{kind}s": kind for kind in [*KINDS, _LAB]},
    **dict.fromkeys(["policy", "policies"], POLICIES.kind),
    **dict.fromkeys(["dataset", "datasets"], DATASETS.kind),
}


def _kinds() -> list[str]:
    """The kinds, for shell completion."""
    return [*KINDS, _LAB]


def show(
    kind: str | None = typer.Argument(
        None,
        metavar="KIND",
        help=f"What to list: {', '.join(KINDS)} or lab. Default: all, by name only.",
        autocompletion=_kinds,
    ),
    json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """List models, data sets, sync policies, codecs and so on, with their options.

    Options are written in brackets after the name: --model "mlp(width=256)".

    Examples:
      echelon list
      echelon list models
      echelon list codec --json
    """
    kind = _OTHER_NAMES.get(kind, kind) if kind else None
    if kind is None:
        kinds = {name: KINDS[name].names() for name in KINDS} | {"lab": shipped_labs()}
        _print_json(kinds) if json else _print_kinds(kinds)
        return
    if kind == _LAB:
        _print_json(shipped_labs()) if json else _print_kinds({"lab": shipped_labs()})
        return
    if kind not in KINDS:
        raise UnknownName("kind", kind, _kinds(), where="echelon list")
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
