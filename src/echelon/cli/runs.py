"""`echelon runs`: the runs of a folder, newest first."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_bytes
from echelon.start.history import ListedRun, list_runs

_RIGHT = ("workers", "steps", "loss", "accuracy", "size")


def runs(
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """List the runs of a folder, newest first: what they trained with, and how they ended.

    The loss is the test loss or, if there was no evaluation, the train loss. A
    run that still goes on, or whose launcher was killed, is unfinished.

    Examples:
      echelon runs
      echelon runs --runs elsewhere --json
    """
    records = list_runs(runs)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(records), indent=2).decode())
    elif records:
        _print_table([_cells(record) for record in records])
    else:
        Console(highlight=False).print(Text(f"no runs in {runs}"), soft_wrap=True)


def _print_table(rows: list[dict[str, str]]) -> None:
    """Print one line per run, in a narrow terminal too: names can be copied."""
    widths = {name: max(len(text) for text in (name, *(row[name] for row in rows))) for name in rows[0]}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in widths:
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row.values()))
    console = Console(highlight=False)
    console.width = max(console.width, sum(widths.values()) + 2 * len(widths))
    console.print(table)


def _cells(record: ListedRun) -> dict[str, str]:
    loss = record.test_loss if record.test_loss is not None else record.train_loss
    began = time.localtime(record.started)
    return {
        "run": record.name,
        "started": "-" if record.started is None else time.strftime("%d %b %H:%M", began),
        "workers": str(record.workers),
        "sync, codec": ", ".join(filter(None, [record.sync, record.codec])),
        "steps": f"{record.steps:,}",
        "loss": "-" if loss is None else f"{loss:.4g}",
        "accuracy": "-" if record.accuracy is None else f"{100 * record.accuracy:.1f} %",
        "outcome": record.outcome,
        "size": show_bytes(record.size_bytes),
    }
