"""`echelon simulate --churn`, `--outage`: what losses of workers cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_seconds
from echelon.errors import ConfigError
from echelon.simulate.churn import ChurnFigures, ChurnSetting, parse_churn, parse_outage, simulate_churn

MOST_WORKERS = 1000


def show_churn(setting: ChurnSetting, churn: Sequence[str], outages: Sequence[str], *, json: bool) -> None:
    """Simulate without faults and with them, and print both."""
    if not 1 <= setting.workers <= MOST_WORKERS:
        raise ConfigError(f"{setting.workers} workers", where="--workers", fix=f"give 1 to {MOST_WORKERS}")
    faults = dataclasses.replace(
        setting,
        churn=tuple(parse_churn(text) for text in churn),
        outages=tuple(parse_outage(text) for text in outages),
    )
    found = simulate_churn(faults)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "value"):
        table.add_column(name, justify="right" if name else "left")
    for name, value in _rows(found):
        table.add_row(name, value)
    console.print(table)
    if found.ended:
        console.print(Text(f"the run was stopped: {found.ended}"), soft_wrap=True)


def _rows(found: ChurnFigures) -> list[tuple[str, str]]:
    return [
        ("faults", f"{found.faults:,}"),
        ("views", f"{found.views:,}"),
        ("steps", f"{found.steps:,} of {found.ideal:,}"),
        ("availability", f"{100 * found.availability:.1f} %"),
        ("members in a step", f"{found.mean_members:,.1f}"),
        ("steps reduced again", f"{found.reduced:,}"),
        ("steps repeated", f"{found.repeated:,}"),
        ("pause, median", show_seconds(found.median_pause_s)),
        ("pause, worst", show_seconds(found.worst_pause_s)),
    ]
