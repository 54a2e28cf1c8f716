"""Which way a group's bytes go: shared memory within a machine, TCP between machines, or torch.distributed.

auto  for each pair of workers: shm on one machine, tcp between machines; c10d where there are GPUs
shm   shared memory, for workers of one machine only
tcp   plain sockets, also within a machine
c10d  torch.distributed with what it finds: Gloo, NCCL, MPI
"""

from __future__ import annotations

import os

import torch

from echelon.comm.c10d import C10dGroup
from echelon.comm.engine import Engine, EngineGroup
from echelon.comm.group import Group
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.comm.meet.tls import CERTIFICATE_VARIABLE, Certificates
from echelon.comm.memory.rails import machines
from echelon.errors import ConfigError


def open_group(
    meeting: Rendezvous,
    place: Place,
    *,
    transport: str,
    collective: str,
    deadline_s: float,
    timeout_s: float,
    sums: bool = True,
) -> Group:
    """Connect workers that have met. `sums`: servers, if there are any, sum for the collectives.

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
