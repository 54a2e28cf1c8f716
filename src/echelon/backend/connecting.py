"""The members of a process group meet at the store that torch gives them, and connect.

Each process group has connections of its own, as with torch's own backends: so groups fail, time out and
close independently, and only members take part when one is made.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from echelon.cluster import interfaces
from echelon.comm.group import Group
from echelon.comm.meet import secret
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Member, Rendezvous, meet_at
from echelon.comm.open import open_group

_LOOPBACK = "127.0.0.1"


def connect(store: Store, rank: int, size: int, timeout_s: float) -> tuple[Group, Rendezvous]:
    """Meet the other members and connect with them. JoinTimeout names those that do not come."""
    address, port = _leader(store)
    me = Member(
        rank=rank,
        node=socket.gethostname(),
        host=_machine(),
        pid=os.getpid(),
        leader_address=_numeric(address, port),
    )
    place = Place(rank=rank, world_size=size, address=address, port=port)
    rendezvous = meet_at(PrefixStore("echelon", store), place, me, timeout_s)
    if all(member.host == me.host for member in rendezvous.members):
        address = _LOOPBACK
    if rank == 0 and not secret.find(os.environ, address)[1]:
        secret.warn_unprotected()
    # Rank 0, because that asks which of its own addresses the others know, wherever the store is.
    towards = Place(rank=0, world_size=size, address=address, port=port)
    group = open_group(
        rendezvous,
        towards,
        transport="shm-or-tcp",
        collective="auto",
        deadline_s=timeout_s,
        timeout_s=timeout_s,
    )
    return group, rendezvous


def _leader(store: Store) -> tuple[str, int]:
    """An address that leads to the network of the members: that of the store, or the leader's."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host, store.port
    given = os.environ.get("MASTER_ADDR")
    if given:
        return given, int(os.environ.get("MASTER_PORT") or 1)
    route = interfaces.default_route()
    return (_LOOPBACK if route is None else route.address), 1


def _numeric(address: str, port: int) -> str:
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    return str(found[0][4][0])


def _machine() -> str:
    """Equal for processes that share memory and reach each other at the loopback address."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    started = boot.read_text().strip() if boot.exists() else ""
    try:
        network = str(Path("/proc/self/ns/net").readlink())
    except OSError:
        network = ""
    return " ".join((socket.gethostname(), started, network))
