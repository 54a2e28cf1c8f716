"""Where is the meeting of a run's workers? The leader opens it, the others find it.

MASTER_ADDR and MASTER_PORT say where, and the leader listens at that address only; Echelon's launchers name
another port in ECHELON_PORT, so that a script's torch.distributed finds MASTER_PORT free. Two others may
hold it already: torchrun, with a store of its own, or the script, with that of torch.distributed. Then the
leader listens at a free port, and the store tells the others the address and the port, and nothing else:
whoever changes them there cannot prove to the others that it knows the secret.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from echelon.cluster import interfaces
from echelon.comm.meet import secret
from echelon.comm.meet.board import BoardStore, Store
from echelon.comm.meet.credentials import Credentials
from echelon.comm.meet.place import Place
from echelon.comm.meet.service import MeetingService
from echelon.comm.meet.tls import Certificates
from echelon.comm.meet.visit import LeaderStore, visit
from echelon.errors import ConfigError, JoinTimeout

_VIEW = b"echelon: meeting"
_BACKLOG = 128
_EVERYWHERE = "::"
_log = logging.getLogger(__name__)

# A process may join again while its first session is open: both use one service.
_services: weakref.WeakValueDictionary[tuple[str, int], LeaderStore] = weakref.WeakValueDictionary()


def open_meeting(place: Place, timeout_s: float) -> BoardStore:
    """The run's store: the leader's own, or a connection to it; JoinTimeout if no leader answers."""
    found, protected = secret.find(os.environ, place.address)
    certificates = Certificates.from_environment(os.environ)
    contexts = certificates.contexts() if certificates is not None else None
    own = Credentials(view=_VIEW, secret=found, rank=place.rank, contexts=contexts)
    if place.rank == 0:
        if not protected:
            secret.warn_unprotected()
        return _lead(place, own, timeout_s)
    store = visit(_finder(place, timeout_s), own, timeout_s=timeout_s)
    if store is None:
        raise _no_leader(place, timeout_s)
    return store


def _no_leader(place: Place, timeout_s: float) -> JoinTimeout:
    return JoinTimeout(
        f"no leader answered at {place.address}:{place.port} within {timeout_s:g} s",
        ranks=(0,),
        where=f"rank {place.rank}",
        fix="start rank 0; check that MASTER_ADDR and MASTER_PORT name it, and check firewalls",
    )


def _lead(place: Place, own: Credentials, timeout_s: float) -> LeaderStore:
    known = (place.address, place.port)
    store = _services.get(known)
    if store is not None:
        return store
    directory = _directory(place, timeout_s)
    address, listeners = _listen(place, 0 if directory is not None else place.port)
    service = MeetingService(listeners, own, size=place.process_count)
    store = LeaderStore(service.board, timeout_s=timeout_s)
    weakref.finalize(store, service.stop).atexit = False  # the process's end is the meeting's
    if directory is not None:
        directory.set(_key(place), f"{address} {service.port}")
    _services[known] = store
    return store


# Where the leader listens ------------------------------------------------------------------------


def _listen(place: Place, port: int) -> tuple[str, list[socket.socket]]:
    """Listeners at the address that MASTER_ADDR names, and the address that others can dial."""
    addresses = _resolved(place.address, *place.further)
    if all(map(interfaces.is_loopback, addresses)) and not secret.is_loopback(place.address):
        # On its own machine, a host's name often leads to loopback, which the others cannot reach.
        return place.address, [_everywhere(place, port)]
    listeners: list[socket.socket] = []
    for address in addresses:
        with contextlib.suppress(OSError):  # not this machine's, or no such family
            listeners.append(
                _listener(place, address, listeners[0].getsockname()[1] if listeners else port)
            )
    if listeners:
        return place.address, listeners
    if port == 0:  # the store may be on another machine than the leader
        own = interfaces.towards(place.address, place.port).address
        return own, [_listener(place, own, 0)]
    _log.warning(
        "MASTER_ADDR is %s, which is not an address of this machine: the leader listens at all of its own",
        place.address,
    )
    return place.address, [_everywhere(place, port)]


def _resolved(*names: str) -> list[str]:
    found = [one for name in names for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def _everywhere(place: Place, port: int) -> socket.socket:
    if not socket.has_dualstack_ipv6():
        return _listener(place, "0.0.0.0", port)
    return _listener(place, _EVERYWHERE, port)


def _listener(place: Place, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server(
            (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=address == _EVERYWHERE
        )
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise ConfigError(
            f"port {port} is in use by another program",
            where=f"rank 0, {place.address}:{port}",
            fix="give another one with --port, or leave it out to have a free one chosen",
        ) from None


# How the others find it --------------------------------------------------------------------------


def _key(place: Place) -> str:
    return f"echelon/{place.attempt}/{place.process_count}/meeting"


def _directory(place: Place, timeout_s: float) -> Store | None:
    """The store of torch's that holds MASTER_PORT already; None if nobody does."""
    if place.hosted:
        return _client(place, timeout_s)
    if dist.is_initialized() and dist.get_world_size() == place.process_count:
        return cast("Store", dist.distributed_c10d._get_default_store())
    return None


def _finder(place: Place, timeout_s: float) -> Callable[[], tuple[str, int] | None]:
    directory = _directory(place, timeout_s)
    if directory is None:
        return lambda: (place.address, place.port)

    def look() -> tuple[str, int] | None:
        if not directory.check([_key(place)]):
            return None
        address, _, port = directory.get(_key(place)).decode(errors="replace").partition(" ")
        return (address, int(port)) if port.isdecimal() else None

    return look


def _client(place: Place, timeout_s: float) -> Store:
    """torchrun's store."""

    def connect() -> Store:
        return TCPStore(
            place.address,
            place.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )

    try:
        return _within(timeout_s + 1, connect)
    except (dist.DistError, RuntimeError, ValueError, TimeoutError) as error:
        raise _no_leader(place, timeout_s) from error


def _within(limit_s: float, act: Callable[[], Store]) -> Store:
    """Return `act()`, or raise TimeoutError: a silent program at that port would block it for ever.

    The call cannot be interrupted, so it runs in a daemon thread that is abandoned on a timeout.
    """
    outcome: list[Store | Exception] = []

    def run() -> None:
        try:
            outcome.append(act())
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            outcome.append(error)

    thread = threading.Thread(target=run, name="echelon-store", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not outcome:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]
