"""`echelon run` and `echelon train`: start workers, show their progress, and print how the run ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from echelon.cli.command import PlainCommand
from echelon.cli.options import with_settings
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.config.units import show_seconds
from echelon.errors import ConfigError, LaunchError
from echelon.launch.run import RunResult, Target, run
from echelon.observe.events import AnyEvent, FaultInjected
from echelon.observe.progress import Progress, closing_table
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

_LAST_LINES = 20
_EMULATE = "Unequal machines"
_PANELS = {
    **dict.fromkeys(["lab", "speed", "delay", "delayed"], _EMULATE),
    **dict.fromkeys(
        ["port", "threads", "start", "join_timeout_s", "round_timeout_s", "runs", "name"], "Launch"
    ),
    **dict.fromkeys(["model", "data", "epochs", "batch", "optimizer", "lr", "momentum"], "Training"),
    **dict.fromkeys(["weight_decay", "until_accuracy", "checkpoint", "loader_workers"], "Training"),
}


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(
        "run",
        cls=PlainCommand,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(with_settings(RunSettings, _PANELS)(_run))
    app.command("train", cls=PlainCommand)(with_settings(TrainSettings, _PANELS)(_train))


class _RunDisplay:
    """Shows the leader's output as it arrives, or a progress display, and what else happens."""

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress
        self._workers = ""

    @property
    def shows_output(self) -> bool:
        """Whether the leader's output has been shown."""
        return self._progress is None

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        workers, threads = len(plan.workers), plan.workers[0].threads
        self._workers = f"{workers} worker{'s' if workers > 1 else ''}"
        _say(
            self._console,
            f"starting {self._workers}, "
            f"{threads} thread{'s' if threads > 1 else ''}{' each' if workers > 1 else ''}; "
            f"record in {_short(folder.path)}",
        )
        for note in notes:
            _say(self._console, f"note: {note}")

    def joined(self, seconds: float) -> None:
        _say(self._console, f"{self._workers} joined after {show_seconds(seconds)}")

    def output(self, data: bytes) -> None:
        if self._progress is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

    def events(self, events: Sequence[AnyEvent]) -> None:
        if self._progress is not None:
            self._progress.update(events)
            return
        for event in events:
            if isinstance(event, FaultInjected):
                _say(self._console, f"fault: {event.detail}")


def _run(
    resolved: Resolved[RunSettings],
    script: str | None = typer.Argument(None, metavar="SCRIPT", help="The training script."),
    args: list[str] | None = typer.Argument(None, metavar="ARGS", help="Its arguments."),
    module: bool = typer.Option(False, "-m", help="SCRIPT is a module, as in python -m."),
) -> None:
    """Run a training script on several workers, on this machine or in an emulated cluster.

    The output of rank 0 is shown. The output of every worker is kept in the
    run's folder. Options of echelon go before SCRIPT, the script's own after it.

    Examples:
      echelon run --workers 4 train.py --epochs 10
      echelon run --workers 4 -m package.train
      echelon run --lab two-sites train.py
      echelon run --workers 4 --speed 1,0.5,0.5,0.25 --shares by-speed train.py
      echelon run --workers 4 --delay "normal(0, 0.25)" --delayed 0.5 train.py
    """
    if script is None:
        raise ConfigError("no script to run", where="echelon run", fix="echelon run --workers 4 train.py")
    if not module and not Path(script).is_file():
        raise LaunchError(
            f"there is no script {script}",
            where=str(Path.cwd()),
            fix="give its path; options of echelon go before it, the script's own after it",
        )
    console = Console(stderr=True)
    argv = ["-m", script, *(args or [])] if module else [script, *(args or [])]
    display = _RunDisplay(console, None)
    outcome = run(resolved, Target(argv=argv, name=Path(script).stem), display)
    _conclude(outcome, console, display)


def _train(resolved: Resolved[TrainSettings]) -> None:
    """Train a built-in model on a built-in data set, without a script.

    `echelon list model` and `echelon list data` show what there is.

    Examples:
      echelon train --model lenet --data digits --workers 4
      echelon train --workers 4 --speed 1,0.5,0.5,0.25 --shares by-speed
      echelon train --lab four-unequal --shares by-speed --epochs 5
      echelon train --model "mlp(width=1024)" --data mnist --until-accuracy 0.95
    """
    settings = resolved.settings
    MODELS.build(settings.model, where="--model")
    DATASETS.build(settings.data, where="--data")
    console = Console()
    name = f"{settings.model.partition('(')[0]}-{settings.data.partition('(')[0]}"
    target = Target(argv=["-m", "echelon.train.job"], name=name)
    with Progress(console=console) as progress:
        display = _RunDisplay(console, progress)
        outcome = run(resolved, target, display)
    if outcome.summary.steps:
        console.print(closing_table(outcome.summary))
    _conclude(outcome, console, display)


def _conclude(outcome: RunResult, console: Console, display: _RunDisplay) -> None:
    """Print where the record is or, after a failure, the failing worker's error and its rank and node."""
    failure = outcome.failure
    folder = _short(outcome.folder.path)
    if failure is None:
        if outcome.code == 0:
            _say(console, f"record: {folder}\npicture: echelon report {folder}")
        else:
            _say(console, f"interrupted; record: {folder}")
        raise typer.Exit(outcome.code)
    errors = Console(stderr=True)
    last_lines = "\n".join(outcome.log_tail.splitlines()[-_LAST_LINES:])
    if failure.text:
        _say(errors, failure.text.rstrip())
    elif last_lines.strip() and not (failure.rank == 0 and display.shows_output):
        _say(errors, f"rank {failure.rank} printed last:\n{last_lines.rstrip()}")
    _say(
        errors,
        f"rank {failure.rank} on {outcome.node} failed: {failure.cause}\n"
        f"  log: {_short(outcome.folder.log_of(failure.rank))}",
    )
    raise typer.Exit(outcome.code)


def _say(console: Console, text: str) -> None:
    """Print without markup, and without breaking lines: paths can be copied."""
    console.print(Text(text), soft_wrap=True)


def _short(path: Path) -> str:
    """The path relative to the current folder, if it lies in it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
