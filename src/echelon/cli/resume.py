"""`echelon resume`: start a run again, from its newest checkpoint."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from echelon.checkpoint.folder import newest_step
from echelon.cli.run import show_run
from echelon.config.resolve import resolve
from echelon.config.schema import RunSettings, TrainSettings
from echelon.errors import CheckpointError
from echelon.observe.run_folder import RunFolder
from echelon.start import recorded_command
from echelon.start.run import Target


def resume(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, its name under --runs, or 'latest'.")
    ] = "latest",
    workers: Annotated[
        int | None, typer.Option("--workers", help="How many workers. Default: as many as there were.")
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs.")] = Path("runs"),
) -> None:
    """Start a run again, with its settings, and continue from its newest checkpoint.

    The run must have been started with --checkpoint-every or --checkpoint. It gets a
    new run folder, and goes on saving to the same folder of checkpoints. With as many
    workers as before, it ends as if it had not stopped.

    Examples:
      echelon resume
      echelon resume runs/20250101-120000-demo
      echelon resume latest --workers 8
    """
    folder = RunFolder.find(run, runs)
    command = recorded_command.read(folder)
    schema = TrainSettings if command.kind == "train" else RunSettings
    resolved = resolve(schema, {"workers": workers}, folder.config)
    settings = resolved.settings
    if not settings.checkpoint:
        raise CheckpointError(
            f"run {folder.name} saved no checkpoints by itself",
            where=str(folder.config),
            fix="start runs with --checkpoint-every 5min, or let the script load what it saved",
        )
    here = settings.on == "local" and not settings.hosts
    console = Console(stderr=command.kind == "run")
    os.chdir(command.cwd)
    if here and newest_step(Path(settings.checkpoint)) is None:
        console.print("there is no checkpoint yet: the run begins again", soft_wrap=True)
    words = "echelon train" if command.kind == "train" else shlex.join(command.argv)
    console.print(Text(f"again, in {command.cwd}: {words}"), soft_wrap=True)
    target = Target(argv=command.argv, name=command.name, plans=True)
    show_run(resolved, target, console, None if command.kind == "train" else sys.stdout.buffer)
