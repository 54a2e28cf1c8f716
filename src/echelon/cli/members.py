"""`echelon join`, `invite` and `leave`: further workers for a running run, and workers that leave it."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from echelon.observe.run_folder import RunFolder
from echelon.start.control_client import ControlClient
from echelon.start.join_elsewhere import join_elsewhere, read_token, write_token

_LOOK_EVERY_S = 0.1
_ADDRESS = re.compile(r"[^/\\s]+:\d+")


def join(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|HOST:PORT",
            help="A run's folder, its name under --runs, or 'latest'; or the address of another machine's.",
        ),
    ] = "latest",
    workers: Annotated[int, typer.Option("--workers", min=1, help="How many workers to add.")] = 1,
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs.")] = Path("runs"),
    token_file: Annotated[
        str, typer.Option("--token-file", help="With an address: the file with the token; - is the input.")
    ] = "-",
    name: Annotated[
        str, typer.Option("--name", help="With an address: how to call this machine; default: its name.")
    ] = "",
) -> None:
    """Add workers to a running run: they start on this machine, and share its work.

    The run must have been started with --min-workers. They get weights,
    optimizer state and the position in the data between two steps, and then
    have their share of every batch; the global batch stays. Their output is in
    the run's folder.

    On the machine of the run its launcher starts them. On another one this
    command does, in the current folder, which has to hold the same script, and
    it ends with its workers. Ctrl-C lets them leave. `echelon invite` gives the
    address and the token.

    Examples:
      echelon join latest --workers 2
      echelon join 10.0.0.1:41234 --token-file token --workers 2
    """
    if _ADDRESS.fullmatch(run) and not Path(run).exists():
        join_elsewhere(run, read_token(token_file), workers, name or socket.gethostname(), typer.echo)
        return
    with closing(ControlClient(RunFolder.find(run, runs))) as client:
        ranks = client.join(workers)
        _follow(
            client,
            ranks,
            {
                "member": "rank {} has joined",
                "left": "rank {} has joined, and left again",
                "gone": "rank {} did not join: see its log in the run's folder",
            },
            failures=("gone",),
        )


def invite(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, its name under --runs, or 'latest'.")
    ] = "latest",
    file: Annotated[
        Path, typer.Option("--file", help="Where to write the token. Who can read it can join.")
    ] = Path("token"),
    minutes: Annotated[float, typer.Option("--minutes", min=0.0, help="How long it is good for.")] = 60.0,
    runs: Annotated[Path, typer.Option("--runs", help="The folder of runs.")] = Path("runs"),
) -> None:
    """Let workers of another machine join a running run: writes a token for it.

    The run must have been started with --min-workers and --hosts. Bring the
    file to the other machine by a way that nobody else can read, such as scp,
    and give it to `echelon join` there.

    Examples:
      echelon invite latest --file token
      echelon invite latest --minutes 10
    """
    with closing(ControlClient(RunFolder.find(run, runs))) as client:
        token, addresses = client.invite(60 * minutes)
    write_token(file, token)
    typer.echo(f"the token is in {file}, for {minutes:g} minutes; on the other machine:")
    for address in addresses:
        typer.echo(f"  echelon join {address} --token-file {file.name} --workers 1")


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
