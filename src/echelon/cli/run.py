"""`echelon run` and `echelon train`: start workers, show what they do, and say how it ended."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from echelon.cli.options import with_settings
from echelon.config.resolve import Resolved
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import ConfigError, LaunchError
from echelon.launch.run import RunResult, Target, run
from echelon.observe.events import AnyEvent, FaultInjected
from echelon.observe.progress import Progress, closing_table
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.zoo.dataset import DATASETS
from echelon.zoo.model import MODELS

_REMEMBERED_BYTES = 16_000
_LAST_LINES = 20
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
        self._last = b""

    def started(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        workers, threads = len(plan.workers), plan.workers[0].threads
        _say(
            self._console,
            f"{workers} worker{'s' if workers > 1 else ''}, "
            f"{threads} thread{'s' if threads > 1 else ''}{' each' if workers > 1 else ''}; "
            f"record in {_short(folder.path)}",
        )
        for note in notes:
            _say(self._console, f"note: {note}")

    def output(self, data: bytes) -> None:
        if self._progress is None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            self._last = (self._last + data)[-_REMEMBERED_BYTES:]

    def has_shown(self, text: str) -> bool:
        """Whether the reader of the terminal has just seen this; torch puts [rank0]: before each line."""
        shown = self._last.decode(errors="replace").replace("[rank0]: ", "").rstrip()
        return sys.stdout.isatty() and sys.stderr.isatty() and shown.endswith(text.rstrip())

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
    shows = _Shows(console, None)
    outcome = run(resolved, Target(argv=argv, name=Path(script).stem), shows)
    _conclude(outcome, console, shows)


def _train(resolved: Resolved[TrainSettings]) -> None:
    """Train a model of the zoo on a data set of the zoo, without a script.

    What there is to choose from: echelon list model, echelon list data.

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
        shows = _Shows(console, progress)
        outcome = run(resolved, target, shows)
    if outcome.summary.steps:
        console.print(closing_table(outcome.summary))
    _conclude(outcome, console, shows)


def _conclude(outcome: RunResult, console: Console, shows: _Shows) -> None:
    """The last lines: where the record is or, after a failure, the failing worker's own words."""
    failure = outcome.failure
    folder = _short(outcome.folder.path)
    if failure is None:
        if outcome.code == 0:
            _say(console, f"record: {folder}\npicture: echelon report {folder}")
        else:
            _say(console, f"interrupted; record: {folder}")
        raise typer.Exit(outcome.code)
    errors = Console(stderr=True)
    told = failure.text or "\n".join(outcome.log_tail.splitlines()[-_LAST_LINES:])
    if told.strip() and not shows.has_shown(told):
        if not failure.text:
            _say(errors, f"rank {failure.rank} printed last:")
        _say(errors, told.rstrip())
    _say(
        errors,
        f"rank {failure.rank} on {outcome.node} failed: {failure.cause}\n"
        f"  log: {_short(outcome.folder.log_of(failure.rank))}",
    )
    raise typer.Exit(outcome.code)


def _say(console: Console, text: str) -> None:
    """As it is: no markup, no emoji, no line broken that someone may want to copy."""
    console.print(Text(text), soft_wrap=True)


def _short(path: Path) -> str:
    """Relative to here, where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
