"""`echelon leave`: lets workers of a running run leave it in an orderly way."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from echelon.observe.run_folder import RunFolder
from echelon.start.control_client import ControlClient

_LOOK_EVERY_S = 0.1


def leave(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, its name under --runs, or 'latest'.")
    ],
    ranks: Annotated[list[int], typer.Argument(metavar="RANK", help="The workers that are to leave.")],
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs.")] = Path("runs"),
) -> None:
    """Let workers leave a running run: they end after a step, and the others share their work.

    The run must have been started with --min-workers, and so many must be
    left. No sample is lost or drawn twice, and who has left is not started
    again. Ranks are those with which workers were started. SIGTERM to a worker
    does the same.

    Examples:
      echelon leave latest 3
      echelon leave runs/20250101-120000-train 2 3
    """
    with closing(ControlClient(RunFolder.find(run, runs))) as client:
        client.leave(ranks)
        _follow(
            client,
            ranks,
            {
                "left": "rank {} has left",
                "member": "rank {} stays: too few would be left without it",
                "gone": "rank {} was lost before it had left",
            },
            failures=("member",),
        )


def _follow(
    client: ControlClient, ranks: Sequence[int], ends: Mapping[str, str], failures: Sequence[str]
) -> None:
    """Say where each worker ends up: `ends` has the words, `failures` are those of exit code 1."""
    pending = list(dict.fromkeys(ranks))
    failed = False
    while pending:
        where = client.where(pending)
        for rank in [rank for rank in pending if where[rank] in ends]:
            typer.echo(ends[where[rank]].format(rank))
            failed = failed or where[rank] in failures
            pending.remove(rank)
        if pending:
            time.sleep(_LOOK_EVERY_S)
    if failed:
        raise typer.Exit(1)
