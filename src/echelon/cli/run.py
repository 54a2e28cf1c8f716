"""`echelon run` and `echelon train`: start workers, show their progress, and print how the run ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import typer
from rich.console import Console
from rich.text import Text

from echelon.checkpoint.folder import newest_step
from echelon.cli.command import PlainCommand
from echelon.cli.options import with_settings
from echelon.config.exit_codes import SAVED_AND_STOPPED
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.config.units import show_seconds
from echelon.errors import ConfigError, LaunchError
from echelon.observe.atomic import check_writable
from echelon.observe.closing import closing_table
from echelon.observe.display import Display
from echelon.observe.events import AnyEvent, WorkerJoined
from echelon.observe.run_folder import RunFolder
from echelon.observe.stall import ranks
from echelon.plan.plan import Plan
from echelon.start.failure import Failure
from echelon.start.layout_choice import chosen_layout
from echelon.start.local_choice import chosen_way
from echelon.start.module import check_module
from echelon.start.run import RunResult, Target, run
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

_LAST_LINES = 20
_EMULATE = "Unequal machines"
_PANELS = {
    **dict.fromkeys(["lab", "speed", "delay", "delayed"], _EMULATE),
    **dict.fromkeys(
        [
            "on",
            "hosts",
            "copy",
            "port",
            "threads",
            "local",
            "start",
            "min_workers",
            "respawn",
            "leave_out",
            "join_timeout_s",
            "round_timeout_s",
            "runs",
            "name",
        ],
        "Launch",
    ),
    **dict.fromkeys(["model", "data", "epochs", "batch", "optimizer", "lr", "momentum"], "Training"),
    **dict.fromkeys(["weight_decay", "until_accuracy", "loader_workers"], "Training"),
    **dict.fromkeys(
        ["checkpoint", "checkpoint_every", "checkpoint_keep", "checkpoint_best"], "Checkpoints"
    ),
}


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(
        "run",
        cls=PlainCommand,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False},
    )(with_settings(RunSettings, _PANELS)(_run))
    app.command("train", cls=PlainCommand)(with_settings(TrainSettings, _PANELS)(_train))


class _Shown:
    """Shows what happens in a run, and at its end what came of it."""

    def __init__(self, console: Console, display: Display, *, script: bool) -> None:
        self._console = console
        self._display = display
        self._script = script
        self._count = 0
        self._joined: set[int] = set()

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        self._count, threads = len(plan.workers), plan.workers[0].threads
        self._display.say(
            f"starting {self._workers}, "
            f"{threads} thread{'s' if threads > 1 else ''}{' each' if self._count > 1 else ''}; "
            f"record in {_short(folder.path)}"
        )
        for note in notes:
            self._display.say(f"note: {note}")

    @property
    def _workers(self) -> str:
        return f"{self._count} worker{'s' if self._count > 1 else ''}"

    def joined(self, seconds: float) -> None:
        whose = "; rank 0's output follows, from its share of each batch"
        self._display.say(
            f"{self._workers} joined after {show_seconds(seconds)}"
            f"{whose if self._script and self._count > 1 else ''}"
        )

    def output(self, data: bytes) -> None:
        self._display.show_output(data)

    def events(self, events: Sequence[AnyEvent]) -> None:
        self._joined |= {event.rank for event in events if isinstance(event, WorkerJoined)}
        self._display.update(events)

    def conclude(self, outcome: RunResult) -> None:
        """Print the figures and where the record is or, after a failure, the worker's error; then exit."""
        if outcome.summary.steps:
            self._console.print(closing_table(outcome.summary))
        failure = outcome.failure
        folder = _short(outcome.folder.path)
        if outcome.unrecorded:
            what = "figures, events and output since then are missing; training was not affected"
            _say(Console(stderr=True), f"the record is not complete: {outcome.unrecorded}; {what}")
        if failure is not None:
            self._blame(outcome, failure)
            if outcome.checkpoints is not None and (step := newest_step(outcome.checkpoints)) is not None:
                _say(Console(stderr=True), f"  go on: echelon resume {folder} (from step {step})")
        elif outcome.code:
            _say(self._console, _stopped(outcome))
        else:
            if not self._joined and self._count > 1:
                each = f"each of the {self._workers} ran all of it"
                fix = "join in the script; `echelon adapt` shows the lines to change"
                _say(self._console, f"warning: the script did not call echelon.join(): {each}. Fix: {fix}")
            elif not outcome.summary.steps:
                _say(self._console, "no step was recorded")
            _say(self._console, f"record: {folder}\npicture: echelon report {folder}")
        raise typer.Exit(outcome.code)

    def _blame(self, outcome: RunResult, failure: Failure) -> None:
        errors = Console(stderr=True)
        last_lines = "\n".join(outcome.log_tail.splitlines()[-_LAST_LINES:])
        if failure.text:
            _say(errors, failure.text.rstrip())
        elif last_lines.strip() and not (failure.rank == 0 and self._script):
            _say(errors, f"rank {failure.rank} printed last:\n{last_lines.rstrip()}")
        _say(errors, failure.sentence(outcome.node))
        if failure.kind == "EOFError" and failure.rank > 0:
            _say(errors, "  why: only rank 0 has the launcher's input; ask there, with session.is_leader")
        if outcome.alike:
            _say(errors, f"  also: {ranks(outcome.alike)}, with the same error")
        _say(errors, f"  log: {_short(outcome.folder.log_of(failure.rank))}")


def _run(
    resolved: Resolved[RunSettings],
    script: str | None = typer.Argument(None, metavar="SCRIPT", help="The training script."),
    args: list[str] | None = typer.Argument(None, metavar="ARGS", help="Its arguments."),
    module: bool = typer.Option(False, "-m", help="SCRIPT is a module, as in python -m."),
) -> None:
    """Run a training script on several workers: here, on other machines, or in an emulated cluster.

    The output of rank 0 is shown, and input goes to rank 0. The output of every
    worker is kept in the run's folder. Options of echelon go before SCRIPT, the script's own after it.

    Examples:
      echelon run --workers 4 train.py --epochs 10
      echelon run --workers 4 -m package.train
      echelon run --hosts a:2,b:4 train.py
      echelon run --lab two-sites train.py
      echelon run --lab two-sites --plan plan.toml train.py
      echelon run --lab two-sites --plan none train.py
      echelon run --workers 4 --speed 1,0.5,0.5,0.25 train.py
      echelon run --workers 4 --shares 4,2,1,1 train.py
      echelon run --local auto train.py
      echelon run --workers 4 --parallel auto train.py
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
    _check_checkpoint(resolved.settings)
    if module:
        check_module(script)
    argv = ["-m", script, *(args or [])] if module else [script, *(args or [])]
    target = Target(argv=argv, name=Path(script).stem, plans=True)
    show_run(resolved, target, Console(stderr=True), sys.stdout.buffer)


def _train(resolved: Resolved[TrainSettings]) -> None:
    """Train a built-in model on a built-in data set, without a script.

    `echelon list model` and `echelon list data` show what there is.

    Examples:
      echelon train --model lenet --data digits --workers 4
      echelon train --workers 4 --speed 1,0.5,0.5,0.25
      echelon train --lab four-unequal --epochs 5
      echelon train --local auto --model lenet --data digits
      echelon train --model "mlp(width=1024)" --data mnist --until-accuracy 0.95
    """
    settings = resolved.settings
    MODELS.build(settings.model, where="--model")
    DATASETS.build(settings.data, where="--data")
    _check_checkpoint(settings)
    name = f"{settings.model.partition('(')[0]}-{settings.data.partition('(')[0]}"
    show_run(resolved, Target(argv=["-m", "echelon.train.job"], name=name, plans=True), Console(), None)


def _check_checkpoint(settings: RunSettings) -> None:
    """Refuse a folder that cannot be written to; one on another machine is not known here."""
    if settings.checkpoint and settings.on == "local" and not settings.hosts:
        check_writable(Path(settings.checkpoint), where="--checkpoint")


def show_run(
    resolved: Resolved[RunSettings], target: Target, console: Console, output: BinaryIO | None
) -> None:
    """Carry out a run and show it; `output` is where the leader's output is shown, if it is."""
    with Display(console, output=output) as display:
        shown = _Shown(console, display, script=output is not None)
        local = chosen_way(resolved, target, display.say)
        layout = chosen_layout(local.resolved, target, display.say)
        outcome = run(layout.resolved, target, shown, [*local.notes, *layout.notes])
        local.seen(outcome.summary, display.say)
    shown.conclude(outcome)


def _stopped(outcome: RunResult) -> str:
    """How a run ended that was asked to stop, and how it goes on."""
    folder = _short(outcome.folder.path)
    step = newest_step(outcome.checkpoints) if outcome.checkpoints is not None else None
    if outcome.code == SAVED_AND_STOPPED:
        at = f" at step {step}" if step is not None else ""
        last = f"stopped by SIGTERM after a last checkpoint{at}, in {_short(outcome.checkpoints or Path())}"
        return f"{last}\ngo on: echelon resume {folder}"
    if step is not None:
        return f"interrupted; record: {folder}\ngo on: echelon resume {folder} (from step {step})"
    return f"interrupted; record: {folder}"


def _say(console: Console, text: str) -> None:
    """Print without markup, and without breaking lines: paths can be copied."""
    console.print(Text(text), soft_wrap=True)


def _short(path: Path) -> str:
    """The path relative to the current folder, if it lies in it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
