"""Opens a group with the transport that was asked for.

auto  shared memory within a machine and TCP between machines; c10d if there are GPUs
shm   shared memory; all workers must be on one machine
tcp   always use TCP, also within a machine
c10d  torch.distributed with the backends it finds: Gloo, NCCL, MPI
"""

from __future__ import annotations

import os

import torch

from echelon.comm.alone import SoloGroup
from echelon.comm.c10d import C10dGroup
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.group import Group
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.comm.meet.tls import CERTIFICATE_VARIABLE, Certificates
from echelon.comm.memory.rails import machines
from echelon.comm.wire.loop import Loop
from echelon.config.choices import Integrity
from echelon.errors import ConfigError


def open_solo() -> Group:
    """The group of a worker that runs alone."""
    return SoloGroup()


def open_server(
    rendezvous: Rendezvous, place: Place, *, deadline_s: float, timeout_s: float, integrity: Integrity
) -> Loop:
    """Connect a server with the workers of its rendezvous; the caller closes the loop."""
    engine = Engine.connect(
        rendezvous,
        place,
        shared_memory=False,
        deadline_s=deadline_s,
        timeout_s=timeout_s,
        integrity=integrity,
    )
    return engine.loop


def open_group(
    rendezvous: Rendezvous,
    place: Place,
    *,
    transport: str,
    collective: str,
    deadline_s: float,
    timeout_s: float,
    sums: bool = True,
    integrity: Integrity = "authenticated",
    silent_s: float = 0.0,
) -> Group:
    """Connect the workers of a rendezvous. `sums`: servers, if there are any, sum for the collectives.

    `silent_s`: a connection to a machine that has answered nothing for so long is closed; 0: never.

    `join` has checked the transport, and whether servers can use it.
    """
    if place.servers:
        transport = "tcp" if sums or transport == "tcp" else "shm-or-tcp"
    if transport == "c10d" or (transport == "auto" and torch.cuda.is_available()):
        if Certificates.from_environment(os.environ) is not None:
            raise ConfigError(
                "TLS was asked for, but torch.distributed does not encrypt",
                where="--transport",
                fix=f"use --transport tcp, or unset {CERTIFICATE_VARIABLE} and its like",
            )
        return C10dGroup.connect(rendezvous, place, deadline_s=deadline_s)
    if transport == "shm" and len(machines(rendezvous.members)) > 1:
        raise ConfigError(
            "transport shm needs all workers on one machine, and they are on several",
            where="--transport",
            fix="use auto, which uses shared memory within each machine",
        )
    engine = Engine.connect(
        rendezvous,
        place,
        shared_memory=transport != "tcp",
        deadline_s=deadline_s,
        timeout_s=timeout_s,
        sums=sums,
        integrity=integrity,
        silent_s=silent_s,
    )
    return EngineGroup(engine, collective)
