"""Connects every worker of a view with every other one, over TCP.

Each worker listens on the interface that leads to the others and leaves its address in the store; the
higher rank of each pair dials. Who cannot prove that it knows the run's secret is turned away.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Mapping

import msgspec

from echelon.comm.handshake import Refused, greet
from echelon.comm.rendezvous import Meeting
from echelon.errors import JoinTimeout

_HANDSHAKE_S = 5.0
_POLL_S = 0.02


class _Address(msgspec.Struct, frozen=True):
    host: str
    port: int


def agree_on_view(meeting: Meeting, secret: bytes | None) -> tuple[bytes, bytes]:
    """The view's id and the run's secret: given by the launcher, or drawn by the leader."""
    store = meeting.store
    if meeting.me.rank == 0:
        store.set("view", uuid.uuid4().hex)
        if secret is None:
            store.set("secret", uuid.uuid4().hex + uuid.uuid4().hex)
    view = bytes.fromhex(store.get("view").decode())
    return view, secret if secret is not None else store.get("secret")


def connect(
    meeting: Meeting, address: str, *, view: bytes, secret: bytes, timeout_s: float
) -> dict[int, socket.socket]:
    """A connection to every other worker, each proven to belong to this view."""
    me, size = meeting.me.rank, len(meeting.members)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    deadline = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    with socket.socket(family, socket.SOCK_STREAM) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((address, 0))
        door.listen(size)
        own = _Address(address, door.getsockname()[1])
        meeting.store.set(f"address/{view.hex()}/{me}", msgspec.json.encode(own).decode())
        answering = threading.Thread(
            target=_answer, args=(door, found, me, size, view, secret, deadline), daemon=True
        )
        answering.start()
        try:
            for rank in range(me):
                found[rank] = _dial(meeting, rank, view, secret, deadline)
        except BaseException:
            door.close()
            raise
        answering.join(max(0.0, deadline - time.monotonic()))
    missing = sorted(set(range(size)) - {me} - found.keys())
    if missing:
        _close(found)
        raise JoinTimeout(
            f"{', '.join(str(meeting.members[rank]) for rank in missing)} did not connect "
            f"within {timeout_s:g} s",
            ranks=tuple(missing),
            where=f"{meeting.me}, listening at {own.host}:{own.port}",
            fix="check that workers can reach each other at all ports, and not only the leader",
        )
    return found


def _answer(
    door: socket.socket,
    found: dict[int, socket.socket],
    me: int,
    size: int,
    view: bytes,
    secret: bytes,
    deadline: float,
) -> None:
    """Let in the higher ranks; strangers are turned away and do not hold up the others for long."""
    while len([rank for rank in found if rank > me]) < size - 1 - me and time.monotonic() < deadline:
        door.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            peer, _ = door.accept()
        except OSError:
            return
        try:
            peer.settimeout(_HANDSHAKE_S)
            rank = greet(peer, view=view, rank=me, secret=secret, dialled=False)
        except (OSError, Refused):
            peer.close()
            continue
        if me < rank < size and rank not in found:
            found[rank] = peer
        else:
            peer.close()


def _dial(meeting: Meeting, rank: int, view: bytes, secret: bytes, deadline: float) -> socket.socket:
    key = f"address/{view.hex()}/{rank}"
    while not meeting.store.check([key]):
        if time.monotonic() > deadline:
            raise JoinTimeout(
                f"{meeting.members[rank]} does not listen", ranks=(rank,), where=str(meeting.me)
            )
        time.sleep(_POLL_S)
    address = msgspec.json.decode(meeting.store.get(key), type=_Address)
    try:
        peer = socket.create_connection(
            (address.host, address.port), timeout=max(0.1, deadline - time.monotonic())
        )
    except OSError as error:
        raise JoinTimeout(
            f"{meeting.members[rank]} cannot be reached at {address.host}:{address.port}: {error}",
            ranks=(rank,),
            where=str(meeting.me),
            fix="check the network and firewalls between the two",
        ) from error
    peer.settimeout(_HANDSHAKE_S)
    answered = greet(peer, view=view, rank=meeting.me.rank, secret=secret, dialled=True)
    if answered != rank:
        peer.close()
        raise Refused(f"rank {answered} answered where rank {rank} was expected", ranks=(rank,))
    return peer


def _close(sockets: Mapping[int, socket.socket]) -> None:
    for one in sockets.values():
        one.close()
