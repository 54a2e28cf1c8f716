"""`echelon run` and `echelon train`: start workers, show what they do, and say how it ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from echelon.cli.options import with_settings
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError, LaunchError
from echelon.launch.run import Outcome, Target, run
from echelon.observe.events import AnyEvent, FaultInjected
from echelon.observe.progress import Progress, closing_table
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

_EMULATE = "Unequal machines"
_PANELS = {
    **dict.fromkeys(["lab", "speed", "delay", "delayed"], _EMULATE),
    **dict.fromkeys(["port", "threads", "join_timeout_s", "round_timeout_s", "runs", "name"], "Launch"),
    **dict.fromkeys(["model", "data", "epochs", "batch", "optimizer", "lr", "momentum"], "Training"),
    **dict.fromkeys(["weight_decay", "until_accuracy", "checkpoint", "loader_workers"], "Training"),
}


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(
        "run", context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
    )(with_settings(RunSettings, _PANELS)(_run))
    app.command("train")(with_settings(TrainSettings, _PANELS)(_train))


class _Shows:
    """Shows the leader's output as it comes, or a progress display, and what else happens."""

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress

    def started(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        workers = len(plan.workers)
        self._console.print(
            f"{workers} worker{'s' if workers > 1 else ''}, "
            f"{plan.workers[0].threads} thread{'s' if plan.workers[0].threads > 1 else ''} each; "
            f"record in {_short(folder.path)}",
            highlight=False,
        )
        for note in notes:
            self._console.print(f"note: {note}", highlight=False)

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
                self._console.print(f"fault: {event.detail}", highlight=False)


def _run(
    resolved: Resolved[RunSettings],
    script: str | None = typer.Argument(None, help="The training script."),
    args: list[str] | None = typer.Argument(None, help="Its arguments."),
    module: bool = typer.Option(False, "-m", help="SCRIPT is the name of a module."),
) -> None:
    """Run a training script on several workers of this machine, or of an emulated cluster.

    The leader's output is shown; every worker's is kept in the run's folder.

    Examples:

        echelon run --workers 4 train.py --epochs 10

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
    outcome = run(resolved, Target(argv=argv, name=Path(script).stem), _Shows(console, None))
    _conclude(outcome, console)


def _train(resolved: Resolved[TrainSettings]) -> None:
    """Train a model of the zoo on a data set of the zoo, without a script.

    Examples:

        echelon train --model lenet --data digits --workers 4

        echelon train --workers 4 --speed 1,0.5,0.5,0.25 --shares by-speed

        echelon train --lab four-unequal --shares by-speed --epochs 5

        echelon train --model "mlp(width=1024, depth=4)" --data mnist --until-accuracy 0.95
    """
    settings = resolved.settings
    MODELS.build(settings.model, where="--model")
    DATASETS.build(settings.data, where="--data")
    if settings.workers is not None and settings.workers > settings.batch:
        raise ConfigError(
            f"a batch of {settings.batch} cannot be shared by {settings.workers} workers",
            where="--workers, --batch",
            fix=f"use a batch of at least {settings.workers}, or fewer workers",
        )
    console = Console()
    name = f"{settings.model.partition('(')[0]}-{settings.data.partition('(')[0]}"
    target = Target(argv=["-m", "echelon.train.job"], name=name)
    with Progress(console=console) as progress:
        outcome = run(resolved, target, _Shows(console, progress))
    if outcome.summary.steps:
        console.print(closing_table(outcome.summary))
    _conclude(outcome, console)


def _conclude(outcome: Outcome, console: Console) -> None:
    """The last lines: where the record is or, after a failure, the failing worker's own words."""
    failure = outcome.failure
    folder = _short(outcome.folder.path)
    if failure is None:
        if outcome.code == 0:
            console.print(f"record: {folder}   picture: echelon report {folder}", highlight=False)
        else:
            console.print(f"interrupted; record: {folder}", highlight=False)
        raise typer.Exit(outcome.code)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    told = failure.text or outcome.log_tail
    if told.strip():
        errors.print(told.rstrip(), markup=False)
    errors.print(
        f"rank {failure.rank} on {outcome.node} failed: {failure.cause}\n"
        f"  log: {_short(outcome.folder.log_of(failure.rank))}",
        markup=False,
    )
    raise typer.Exit(outcome.code)


def _short(path: Path) -> str:
    """Relative to here, where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
