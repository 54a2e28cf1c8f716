"""`echelon certs`: an authority, and a certificate for each machine of a run."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer


def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files are written.")],
    machine: Annotated[
        list[str] | None,
        typer.Option(
            "--machine",
            metavar="NAMES",
            help="A machine: its host name and addresses, with commas. May be repeated. Default: this one.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are valid.")] = 365,
) -> None:
    """Make certificates for TLS between the machines of a run.

    The folder gets an authority, if it has none, and a certificate and key for
    each machine, named after it. Give each machine its own two files and
    authority.pem; authority.key stays here and signs for further machines.

    Examples:
      echelon certs keys
      echelon certs keys --machine gpu-a,10.0.0.2 --machine gpu-b,10.0.0.3
    """
    from echelon.cluster import interfaces
    from echelon.comm.meet import certs as making

    here = [one.address.partition("%")[0] for one in interfaces.offered()]
    machines = [names.split(",") for names in machine] if machine else [[socket.gethostname(), *here]]
    made = making.make(folder, machines, days=days)
    for path in made:
        typer.echo(f"on {path.stem}:")
        typer.echo(f"  export ECHELON_TLS_CERT={path}")
        typer.echo(f"  export ECHELON_TLS_KEY={path.with_suffix('.key')}")
        typer.echo(f"  export ECHELON_TLS_CA={folder / making.AUTHORITY}.pem")
