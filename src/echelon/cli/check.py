"""`echelon check`: does a script compute the same alone and on several workers?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from echelon.cli.command import PlainCommand
from echelon.errors import LaunchError

if TYPE_CHECKING:
    from echelon.check.check import CheckReport

_CODES = {"same": 0, "interrupted": 130}


def register(app: typer.Typer) -> None:
    """Add the command; what it does not know belongs to the script."""
    app.command("check", cls=PlainCommand, context_settings={"ignore_unknown_options": True})(check)


def check(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The training script.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    workers: Annotated[int, typer.Option(metavar="N", help="How many workers.")] = 2,
    steps: Annotated[int, typer.Option(metavar="N", help="How many steps of each optimizer.")] = 5,
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="The largest relative difference of gradients. Default: 1e-4; 3e-2 in 16 bits.",
            show_default=False,
        ),
    ] = None,
    shares: Annotated[
        str, typer.Option(metavar="SHARES", help="Parts of a batch: equal, or a number per worker: 3,1.")
    ] = "equal",
    module: Annotated[bool, typer.Option("--module", help="SCRIPT is a module, as in python -m.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check that a script computes the same alone and on several workers.

    Runs a few steps alone and on workers, with the same random draws, compares
    losses, gradients and weights, and says where they part and why. The exit code
    is 0 if they are the same, 1 if they part or the script fails.

    Options of echelon may come before or after SCRIPT. What echelon does not know,
    and all after --, belongs to the script. Its output is shown only if it fails.
    What it saves with torch.save or session.save goes to a temporary folder.

    Examples:
      echelon check train.py
      echelon check train.py --workers 4 --steps 10 --epochs 1
      echelon check --workers 4 train.py -- --workers 8
      echelon check train.py --shares 3,1 --json
    """
    # Imported here, so that `echelon --help` does not load them.
    import msgspec

    from echelon.check.check import CheckSettings
    from echelon.check.check import check as run_check

    if not module and not Path(script).is_file():
        raise LaunchError(
            f"there is no script {script}",
            where=str(Path.cwd()),
            fix="give its path, or --module for the name of a module",
        )
    program = ["-m", script, *(args or [])] if module else [script, *(args or [])]
    settings = CheckSettings(
        program=program,
        name=script if module else Path(script).name,
        workers=workers,
        steps=steps,
        tolerance=tolerance,
        shares=shares,
    )
    with _Display(Console(stderr=True, highlight=False), steps) as display:
        report = run_check(settings, display)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _show(report, Console(highlight=False))
    raise typer.Exit(_CODES.get(report.outcome, 1))


class _Display:
    """Shows how far the check is: in one line of a terminal that disappears, or line by line."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._status = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> _Display:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self, side: str) -> None:
        self._say(f"{side}: starting")

    def running(self, side: str) -> None:
        self._say(f"{side}: {_steps(self._steps)}")

    def stepped(self, side: str, step: int) -> None:
        if self._status is not None:
            self._status.update(f"{side}: step {step} of {self._steps}")

    def _say(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text, soft_wrap=True)


def _show(report: CheckReport, console: Console) -> None:
    if report.error:
        console.print(Text(report.error), soft_wrap=True)
    if report.steps:
        console.print(_table(report))
    good = report.outcome == "same"
    console.print(Text(report.text, style="bold green" if good else "bold red"), soft_wrap=True)
    if report.cause:
        console.print(Text(f"  cause: {report.cause}"), soft_wrap=True)
    if report.fix:
        console.print(Text(f"  fix:   {report.fix}"), soft_wrap=True)
    for note in report.notes:
        console.print(Text(f"  note:  {note}"), soft_wrap=True)


def _table(report: CheckReport) -> Table:
    from echelon.check.check import brief

    several = len({step.optimizer for step in report.steps}) > 1
    table = Table(box=None, pad_edge=False)
    heads = ["step", "loss alone", f"{report.workers} workers", "loss by", "gradients by", "weights by"]
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("parts at")
    for step in report.steps:
        table.add_row(
            f"{step.step}{f' {step.optimizer}' if several else ''}",
            "-" if step.loss_alone is None else f"{step.loss_alone:.6g}",
            "-" if step.loss_workers is None else f"{step.loss_workers:.6g}",
            "-" if step.loss is None else brief(step.loss),
            brief(step.gradients),
            brief(step.weights),
            f"{step.what} of {step.parameter}" if step.what else "",
        )
    return table


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
