"""Which way a group's bytes go: shared memory within a machine, TCP between machines, or torch.distributed.

auto  for each pair of workers: shm on one machine, tcp between machines; c10d where there are GPUs
shm   shared memory, for workers of one machine only
tcp   plain sockets, also within a machine
c10d  torch.distributed with what it finds: Gloo, NCCL, MPI
"""

from __future__ import annotations

import os
from typing import Literal, get_args

import torch

from echelon.comm.alone import SoloGroup
from echelon.comm.c10d import C10dGroup
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.group import Group
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Meeting
from echelon.comm.meet.tls import CERTIFICATE_VARIABLE, Certificates
from echelon.comm.memory.rails import machines
from echelon.comm.wire.loop import Loop
from echelon.errors import ConfigError

Transport = Literal["auto", "shm", "tcp", "c10d"]


def open_solo() -> Group:
    """The group of a worker that runs alone."""
    return SoloGroup()


def open_server(meeting: Meeting, place: Place, *, deadline_s: float, timeout_s: float) -> Loop:
    """Connect a server with the workers that it has met; the caller closes the loop."""
    engine = Engine.connect(meeting, place, shared_memory=False, deadline_s=deadline_s, timeout_s=timeout_s)
    return engine.loop


def open_group(
    meeting: Meeting,
    place: Place,
    *,
    transport: str,
    collective: str,
    deadline_s: float,
    timeout_s: float,
    sums: bool = True,
) -> Group:
    """Connect workers that have met. `sums`: servers, if there are any, sum for the collectives."""
    if transport not in get_args(Transport):
        raise ConfigError(
            f"there is no transport {transport!r}",
            where="--transport",
            fix=f"use one of {', '.join(get_args(Transport))}",
        )
    if place.servers and transport == "c10d":
        raise ConfigError(
            "servers use Echelon's own transports, not torch.distributed",
            where="--servers",
            fix="leave --transport at auto, or start no servers",
        )
    if place.servers and sums and (transport in ("c10d", "shm") or collective not in ("auto", "ps")):
        raise ConfigError(
            f"servers of their own sum over TCP as collective ps, not {transport} and {collective}",
            where="--servers",
            fix="leave --transport and --collective at auto, or start no servers",
        )
    if place.servers:
        transport = "tcp" if sums or transport == "tcp" else "shm-or-tcp"
    if transport == "c10d" or (transport == "auto" and torch.cuda.is_available()):
        if Certificates.from_environment(os.environ) is not None:
            raise ConfigError(
                "TLS was asked for, but torch.distributed does not encrypt",
                where="--transport",
                fix=f"use --transport tcp, or unset {CERTIFICATE_VARIABLE} and its like",
            )
        return C10dGroup.connect(meeting, place, deadline_s=deadline_s)
    if transport == "shm" and len(machines(meeting.members)) > 1:
        raise ConfigError(
            "shared memory was asked for, but the workers are on different machines",
            where="--transport",
            fix="use auto, which takes shared memory where it can",
        )
    engine = Engine.connect(
        meeting,
        place,
        shared_memory=transport != "tcp",
        deadline_s=deadline_s,
        timeout_s=timeout_s,
        sums=sums,
    )
    return EngineGroup(engine, collective)
