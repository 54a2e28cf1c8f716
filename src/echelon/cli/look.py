"""`echelon trace` and `echelon report`: show a run, also while it goes on."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from echelon.observe.damage import damage_of
from echelon.observe.report import write_report
from echelon.observe.run_folder import RunFolder
from echelon.observe.trace import write_trace

_Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, its name under --runs, or 'latest'.")
]
_Runs = Annotated[Path, typer.Option("--runs", help="The folder of runs.")]


def trace(
    run: _Run = "latest",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The file to write; .gz compresses it. Default: in the run's folder.",
        ),
    ] = None,
    runs: _Runs = Path("runs"),
) -> None:
    """Write a run's timeline as Chrome-trace JSON, for Perfetto.

    It has a lane for each worker and activity (data, compute, wait, apply),
    marks for faults, checkpoints and evaluations, and curves of loss and
    throughput.

    Examples:
      echelon trace
      echelon trace 20250101-120000-demo --out demo.json.gz
    """
    folder = RunFolder.find(run, runs)
    written = write_trace(folder, out if out is not None else folder.path / "trace.json")
    _say(f"{written}")
    _say("open https://ui.perfetto.dev and drop the file there")


def report(
    run: _Run = "latest",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file to write. Default: in the run's folder.")
    ] = None,
    runs: _Runs = Path("runs"),
    show: Annotated[bool, typer.Option("--open", help="Show the page in the browser.")] = False,
) -> None:
    """Write one self-contained HTML page about a run.

    It shows loss and throughput, where each worker's time went, and which
    workers kept the others waiting. The page needs no network.

    Examples:
      echelon report
      echelon report runs/20250101-120000-demo --out demo.html --open
    """
    folder = RunFolder.find(run, runs)
    written = write_report(folder, out if out is not None else folder.path / "report.html")
    _say(f"{written}")
    if damage := damage_of(folder):
        _say(f"warning: the record is damaged: {'; '.join(damage)}. Figures are of what is left.")
    if show and not webbrowser.open(written.resolve().as_uri()):
        _say("no browser could be started; open the file by hand")


def _say(text: str) -> None:
    Console().print(Text(text), soft_wrap=True)
