"""Connects every worker of a view with every other one, over TCP.

Each worker listens on the interface that leads to the leader, and on its other ones, and publishes the
addresses in the store; the higher rank of each pair dials, and tries them in that order. A peer that cannot
prove that it knows the run's secret is rejected. Incoming connections are answered concurrently, so that a
silent peer delays nobody. With certificates, the handshake and all later traffic are encrypted (`tls.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import selectors
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from torch.distributed import DistError

from echelon.comm.meet import tls
from echelon.comm.meet.board import decode_id, decode_value
from echelon.comm.meet.credentials import Credentials, Link
from echelon.comm.meet.handshake import HungUp, Proven, Refused, greet
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.comm.meet.strangers import HANDSHAKE_S, Strangers
from echelon.comm.meet.tls import Certificates
from echelon.errors import Corrupt, JoinTimeout, LaunchError, WorkerError

_HANDSHAKE_S = HANDSHAKE_S
_POLL_S = 0.02
_TICK_S = 0.05
_ASK_S = 0.2
_BACKLOG = 256
_MOST_CALLERS = 256
_PORTS = 1 << 16
_FIRST_TRY_S = 2.0  # enough for one lost packet
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # like a dropped plain connection: try again
_log = logging.getLogger(__name__)


class ListenAddress(msgspec.Struct, frozen=True):
    """Where a worker listens, and whether it uses TLS, so that a mismatch gives a clear error.

    `further` are other addresses and ports of it, for peers that do not reach the first.
    """

    host: str
    port: int
    encrypted: bool = False
    further: tuple[tuple[str, int], ...] = ()


def agree_on_view(rendezvous: Rendezvous) -> bytes:
    """The view's id, which the leader draws."""
    store = rendezvous.store
    with store_alive(rendezvous):
        if rendezvous.me.rank == 0:
            store.set("view", uuid.uuid4().hex)
        return decode_id(store.get("view"), key="view", peer=str(rendezvous.members[0]))


def connect(
    rendezvous: Rendezvous,
    address: str,
    *,
    further: Sequence[str] = (),
    view: bytes,
    secret: bytes,
    timeout_s: float,
    certificates: Certificates | None = None,
    authenticated: bool = True,
) -> dict[int, Link]:
    """Connect to every other worker and check that each belongs to this view; with certificates, encrypt.

    `address` is this worker's own, `further` are others of its machine. A link-local one names its
    interface, as in fe80::1%eth0.
    """
    me, size = rendezvous.me.rank, len(rendezvous.members)
    deadline = time.monotonic() + timeout_s
    contexts = certificates.contexts() if certificates is not None else None
    own = Credentials(view=view, secret=secret, rank=me, contexts=contexts, authenticated=authenticated)
    with contextlib.ExitStack() as stack:
        listeners, here = listen_at(address, further, rendezvous, stack, encrypted=contexts is not None)
        answering = Answering(listeners, own, set(range(me + 1, size)))
        dialled: dict[int, Link] = {}
        try:
            with store_alive(rendezvous):
                publish(rendezvous, view, here)
                for rank in range(me):
                    dialled[rank] = dial(rendezvous, rank, own, (address, *further), deadline)
                while not answering.wait(_ASK_S) and time.monotonic() < deadline:
                    rendezvous.check_departures()
        except BaseException:
            answering.stop()
            close_all(dialled | answering.found)
            raise
        answering.stop()
    found = dialled | answering.found
    missing = sorted(set(range(size)) - {me} - found.keys())
    if missing:
        close_all(found)
        raise not_connected(rendezvous, missing, answering.refused, here, timeout_s)
    return found


def publish(rendezvous: Rendezvous, view: bytes, here: ListenAddress) -> None:
    """Tell the others where this worker listens for connections of that view."""
    key = f"address/{view.hex()}/{rendezvous.me.rank}"
    rendezvous.store.set(key, msgspec.json.encode(here).decode())


def listen_at(
    address: str,
    further: Sequence[str],
    rendezvous: Rendezvous,
    stack: contextlib.ExitStack,
    *,
    encrypted: bool,
) -> tuple[list[socket.socket], ListenAddress]:
    """Listeners at this worker's address and at further ones, closed with the stack; and where they are."""
    listeners = [stack.enter_context(listen(address, rendezvous))]
    listeners += [stack.enter_context(one) for one in _listen_also(further)]
    (host, port), *others = [listener.getsockname()[:2] for listener in listeners]
    return listeners, ListenAddress(host, port, encrypted=encrypted, further=tuple(others))


def listen(address: str, rendezvous: Rendezvous) -> socket.socket:
    """A listening socket at that address, which may name its interface, as in fe80::1%eth0."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound = socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4]  # keeps the IPv6 zone
        listener.bind(bound)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen at {address}: {error.strerror}",
            where=str(rendezvous.me),
            fix="check that MASTER_ADDR leads to the network that the workers share",
        ) from error
    return listener


def _listen_also(addresses: Sequence[str]) -> Iterator[socket.socket]:
    """Listeners at these addresses; one that cannot be used is left out."""
    for address in addresses:
        with contextlib.suppress(OSError):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            yield socket.create_server((address, 0), family=family, backlog=_BACKLOG)


def not_connected(
    rendezvous: Rendezvous,
    missing: list[int],
    refused: dict[int, Refused],
    here: ListenAddress,
    timeout_s: float,
) -> JoinTimeout:
    """The error for workers that did not connect; it says why they were refused, if they were."""
    names = ", ".join(str(rendezvous.members[rank]) for rank in missing)
    rejected = [refused[rank] for rank in missing if rank in refused]
    why = f"; {rejected[0].message}" if rejected else ""
    fix = "check that workers can reach each other at all ports, and not only the leader"
    return JoinTimeout(
        f"{names} did not connect within {timeout_s:g} s{why}",
        ranks=tuple(missing),
        where=f"{rendezvous.me}, listening at {here.host} port {here.port}",
        fix=rejected[0].fix if rejected else fix,
    )


# Answering ---------------------------------------------------------------------------------------


class Answering:
    """A thread that accepts connections from the wanted ranks, and rejects all others."""

    def __init__(self, listeners: Sequence[socket.socket], own: Credentials, wanted: set[int]) -> None:
        self.found: dict[int, Link] = {}
        self.refused: dict[int, Refused] = {}
        self._own = own
        self._wanted = wanted
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._rejected = 0
        self._stopped = False
        self._complete = threading.Event()
        for listener in listeners:
            listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="echelon-listener", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; whether all awaited workers have connected."""
        return self._complete.wait(seconds)

    def stop(self) -> None:
        """Stop listening, and close connections whose handshake is unfinished."""
        self._stopped = True
        self._thread.join()
        if self._rejected:
            _log.warning("rejected %d connections that are not from this run's workers", self._rejected)

    def _run(self) -> None:
        own = self._own
        with selectors.DefaultSelector() as ready:
            strangers = Strangers(
                ready,
                talk=lambda sock: own.talk(sock, dialled=False),
                proven=self._accept,
                rejected=self._reject,
                context=own.contexts.answering if own.contexts is not None else None,
                most=_MOST_CALLERS,
                limit_s=_HANDSHAKE_S,
            )
            for listener in self._listeners.values():
                ready.register(listener, selectors.EVENT_READ)
            try:
                while not self._stopped and self._wanted - self.found.keys():
                    for key, _ in ready.select(_TICK_S):
                        if key.fd in self._listeners:
                            strangers.accept(self._listeners[key.fd])
                        else:
                            strangers.hears(key.fd)
                    strangers.tick()
            finally:
                strangers.close()
        self._complete.set()

    def _accept(self, sock: socket.socket, proven: Proven) -> None:
        rank = proven.rank
        if rank not in self._wanted:
            self._rejected += 1
            sock.close()
            return
        if rank in self.found:  # it knows the secret, and dialled again because it missed the reply
            self.found[rank].sock.close()
        self.found[rank] = self._own.link(sock, proven)

    def _reject(self, refusal: Refused | None, address: str) -> None:
        self._rejected += 1
        if refusal is not None:
            self.refused.update(dict.fromkeys(refusal.ranks, refusal))


# Dialling ----------------------------------------------------------------------------------------


def dial(rendezvous: Rendezvous, rank: int, own: Credentials, mine: Sequence[str], deadline: float) -> Link:
    """Connect to a listening worker; try its addresses in turn until the deadline if it does not answer.

    `mine` are this worker's own addresses.
    """
    address = _address_of(rendezvous, rank, own.view, deadline)
    peer, here = str(rendezvous.members[rank]), str(rendezvous.me)
    if address.encrypted != (own.contexts is not None):
        which = "was given TLS certificates, this worker was not"
        if not address.encrypted:
            which = "was not given TLS certificates, this worker was"
        raise Refused(f"{peer} {which}", ranks=(rank,), where=here, fix=tls.ALL_OR_NONE)
    other, me = rendezvous.members[rank], rendezvous.me
    elsewhere = (other.host, other.node) != (me.host, me.node)  # two machines may have one host name
    places = _places(address, mine, elsewhere=elsewhere)
    outcomes: dict[tuple[str, int], str] = {}
    patience_s = _FIRST_TRY_S
    while True:
        for place in places:
            until = deadline if len(places) == 1 else min(deadline, time.monotonic() + patience_s)
            try:
                return _try(place, rank, own, until, deadline, (place[0], other.host, other.node))
            except (OSError, WorkerError) as error:
                if place == places[0]:  # at another one, another machine may have answered
                    _raise_if_final(error, peer=peer, rank=rank, where=here)
                outcomes[place] = error.message if isinstance(error, WorkerError) else str(error)
            rendezvous.check_departures()
        if time.monotonic() > deadline:
            tried = "; ".join(f"{host} port {port}: {why}" for (host, port), why in outcomes.items())
            raise JoinTimeout(
                f"{peer} cannot be reached at {tried}",
                ranks=(rank,),
                where=here,
                fix="check the network and firewalls between the two",
            )
        patience_s *= 2
        time.sleep(_POLL_S)


def _places(address: ListenAddress, mine: Sequence[str], *, elsewhere: bool) -> list[tuple[str, int]]:
    """Where to dial. An address that this machine has, too, does not lead to another machine."""
    zone = mine[0].partition("%")[2]
    found = []
    for host, port in ((address.host, address.port), *address.further):
        named = f"{host}%{zone}" if zone and ipaddress.ip_address(host).is_link_local else host
        if not (elsewhere and host in mine):
            found.append((named, port))
    return found or [(address.host, address.port)]


def _raise_if_final(error: Exception, *, peer: str, rank: int, where: str) -> None:
    """Raise what another attempt would not change."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT_OFF):
        raise tls.refusal(error, peer=peer, rank=rank, where=where) from error
    if isinstance(error, WorkerError) and not isinstance(error, HungUp):
        raise error


def _try(
    place: tuple[str, int],
    rank: int,
    own: Credentials,
    connect_until: float,
    deadline: float,
    names: Sequence[str] = (),
) -> Link:
    """Connect; the certificate has to name the address, or be one of `names`."""
    peer = socket.create_connection(place, timeout=max(0.1, connect_until - time.monotonic()))
    until = time.monotonic() + min(_HANDSHAKE_S, max(0.1, deadline - time.monotonic()))
    try:
        if own.contexts is not None:
            peer.settimeout(until - time.monotonic())
            peer = own.contexts.dialling.wrap_socket(peer, server_side=True)
            tls.check_names(peer, names, rank=rank)
        proven = greet(peer, own.talk(peer, dialled=True), timeout_s=until - time.monotonic())
        if proven.rank != rank:
            raise Refused(f"rank {proven.rank} answered where rank {rank} was expected", ranks=(rank,))
    except BaseException:
        peer.close()
        raise
    return own.link(peer, proven)


def _address_of(rendezvous: Rendezvous, rank: int, view: bytes, deadline: float) -> ListenAddress:
    key = f"address/{view.hex()}/{rank}"
    asked = time.monotonic()
    while not rendezvous.store.check([key]):
        now = time.monotonic()
        if now > deadline:
            raise JoinTimeout(
                f"{rendezvous.members[rank]} does not listen", ranks=(rank,), where=str(rendezvous.me)
            )
        if now > asked + _ASK_S:
            rendezvous.check_departures()
            asked = now
        time.sleep(_POLL_S)
    peer = str(rendezvous.members[rank])
    found = decode_value(rendezvous.store.get(key), ListenAddress, key=key, peer=peer)
    for host, port in ((found.host, found.port), *found.further):
        if not _is_address(host) or not 0 < port < _PORTS:
            raise Corrupt(f"{peer} has published {host!r} port {port}, where nobody can listen", where=key)
    return found


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def store_alive(rendezvous: Rendezvous) -> Iterator[None]:
    """Raise JoinTimeout if the store fails: it ends with the leader."""
    try:
        yield
    except (DistError, RuntimeError) as error:
        raise JoinTimeout(
            f"{rendezvous.members[0]} left while the others were joining",
            ranks=(0,),
            where=str(rendezvous.me),
            fix="see its log",
        ) from error


def close_all(links: Mapping[int, Link]) -> None:
    """Close the connections."""
    for one in links.values():
        one.sock.close()
