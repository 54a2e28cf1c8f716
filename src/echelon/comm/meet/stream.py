"""Opens streams from some workers to the leader, besides the connections that reduce.

They outlive those: what ends a reduction does not end them. A worker proves itself as it does to any other
worker, with a view of their own; with certificates, the streams are encrypted (`mesh.py`, `tls.py`). Their
messages are sealed with the link's keys (`wire/sealed.py`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Collection

from echelon.comm.meet import mesh, secret
from echelon.comm.meet.board import decode_id
from echelon.comm.meet.credentials import Credentials, Link
from echelon.comm.meet.mesh import Answering
from echelon.comm.meet.place import Place
from echelon.comm.meet.rendezvous import Rendezvous, further_addresses, interface_address
from echelon.comm.meet.tls import Certificates

_VIEW = "stream-view"
_ASK_S = 0.2


def answer(
    rendezvous: Rendezvous, place: Place, ranks: Collection[int], *, timeout_s: float
) -> dict[int, Link]:
    """On the leader: wait until these workers have opened their streams. The sockets do not block."""
    view = secrets.token_bytes(16)
    own = _credentials(view, place)
    rendezvous.publish(_VIEW, view.hex())
    until = time.monotonic() + timeout_s
    address = interface_address(rendezvous, place)
    further = further_addresses(rendezvous, address)
    with contextlib.ExitStack() as stack:
        listeners, here = mesh.listen_at(
            address, further, rendezvous, stack, encrypted=own.contexts is not None
        )
        answering = Answering(listeners, own, set(ranks))
        try:
            with mesh.store_alive(rendezvous):
                mesh.publish(rendezvous, view, here)
                while not answering.wait(_ASK_S) and time.monotonic() < until:
                    rendezvous.check_departures()
        except BaseException:
            answering.stop()
            mesh.close_all(answering.found)
            raise
        answering.stop()
    missing = sorted(set(ranks) - answering.found.keys())
    if missing:
        mesh.close_all(answering.found)
        raise mesh.not_connected(rendezvous, missing, answering.refused, here, timeout_s)
    return answering.found


def dial_leader(rendezvous: Rendezvous, place: Place, *, timeout_s: float) -> Link:
    """On another worker: open a stream to the leader, which waits for it."""
    own = _credentials(_view(rendezvous), place)
    address = interface_address(rendezvous, place)
    mine = [address, *further_addresses(rendezvous, address)]
    with mesh.store_alive(rendezvous):
        return mesh.dial(rendezvous, 0, own, mine, time.monotonic() + timeout_s)


def _view(rendezvous: Rendezvous) -> bytes:
    return decode_id(rendezvous.lookup(_VIEW), key=_VIEW, peer=str(rendezvous.members[0]))


def _credentials(view: bytes, place: Place) -> Credentials:
    certificates = Certificates.from_environment(os.environ)
    contexts = certificates.contexts() if certificates is not None else None
    found, _ = secret.find(os.environ, place.address)
    return Credentials(view=view, secret=found, rank=place.rank, contexts=contexts)
