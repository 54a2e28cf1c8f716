"""Connects every worker of a view with every other one, over TCP.

Each worker listens on the interface that leads to the others and leaves its address in the store; the
higher rank of each pair dials. Who cannot prove that it knows the run's secret is turned away. Callers are
answered side by side, so that one who says nothing holds up nobody. With certificates, all of this and all
that follows is encrypted (`tls.py`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import selectors
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
from torch.distributed import DistError

from echelon.comm.meet import tls
from echelon.comm.meet.handshake import HandshakeStep, HungUp, Refused, conversation, greet
from echelon.comm.meet.rendezvous import Meeting
from echelon.comm.meet.tls import Certificates, Contexts
from echelon.errors import JoinTimeout, LaunchError

_HANDSHAKE_S = 5.0
_POLL_S = 0.02
_TICK_S = 0.05
_ASK_S = 0.2
_MOST_CALLERS = 256
_CUT_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # as when a plain connection is: try again
_log = logging.getLogger(__name__)


class _Address(msgspec.Struct, frozen=True):
    """Where a worker listens, and whether it speaks TLS, so that who does not learns why it fails."""

    host: str
    port: int
    encrypted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What a worker shows to be let in."""

    view: bytes
    secret: bytes
    rank: int
    contexts: Contexts | None = None


def agree_on_view(meeting: Meeting, secret: bytes | None) -> tuple[bytes, bytes]:
    """The view's id and the run's secret: given by the launcher, or drawn by the leader."""
    store = meeting.store
    with _store_there(meeting):
        if meeting.me.rank == 0:
            store.set("view", uuid.uuid4().hex)
            if secret is None:
                store.set("secret", secrets.token_hex(32))
        view = bytes.fromhex(store.get("view").decode())
        return view, secret if secret is not None else store.get("secret")


def connect(
    meeting: Meeting,
    address: str,
    *,
    view: bytes,
    secret: bytes,
    timeout_s: float,
    certificates: Certificates | None = None,
) -> dict[int, socket.socket]:
    """A connection to every other worker, each proven to belong to this view; encrypted, if so asked.

    `address` is this worker's own. A link-local one names its interface, as in fe80::1%eth0.
    """
    me, size = meeting.me.rank, len(meeting.members)
    deadline = time.monotonic() + timeout_s
    contexts = certificates.contexts() if certificates is not None else None
    own = Credentials(view=view, secret=secret, rank=me, contexts=contexts)
    with _listen(address, meeting) as door:
        host, port = door.getsockname()[:2]
        here = _Address(host, port, encrypted=contexts is not None)
        answering = _Answering(door, own, size)
        dialled: dict[int, socket.socket] = {}
        try:
            with _store_there(meeting):
                meeting.store.set(f"address/{view.hex()}/{me}", msgspec.json.encode(here).decode())
                for rank in range(me):
                    dialled[rank] = _dial(meeting, rank, own, address.partition("%")[2], deadline)
                while not answering.wait(_ASK_S) and time.monotonic() < deadline:
                    meeting.check_goodbyes()
        except BaseException:
            answering.stop()
            _close(dialled | answering.found)
            raise
        answering.stop()
    found = dialled | answering.found
    missing = sorted(set(range(size)) - {me} - found.keys())
    if missing:
        _close(found)
        raise _missing(meeting, missing, answering.refused, here, timeout_s)
    return found


def _listen(address: str, meeting: Meeting) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.bind(socket.getaddrinfo(address, 0, family, socket.SOCK_STREAM)[0][4])  # knows of zones
        door.listen(_MOST_CALLERS)
    except OSError as error:
        door.close()
        raise LaunchError(
            f"cannot listen at {address}: {error.strerror}",
            where=str(meeting.me),
            fix="check that MASTER_ADDR leads to the network that the workers share",
        ) from error
    return door


def _missing(
    meeting: Meeting, missing: list[int], refused: dict[int, Refused], here: _Address, timeout_s: float
) -> JoinTimeout:
    names = ", ".join(str(meeting.members[rank]) for rank in missing)
    turned_away = [refused[rank] for rank in missing if rank in refused]
    why = f"; {turned_away[0].message}" if turned_away else ""
    fix = "check that workers can reach each other at all ports, and not only the leader"
    return JoinTimeout(
        f"{names} did not connect within {timeout_s:g} s{why}",
        ranks=tuple(missing),
        where=f"{meeting.me}, listening at {here.host} port {here.port}",
        fix=turned_away[0].fix if turned_away else fix,
    )


# Answering ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Caller:
    """Somebody at the door, and how far the conversation with it is."""

    sock: socket.socket
    talk: Generator[HandshakeStep, bytes, int]
    until: float
    awaits: int = 0
    heard: bytearray = field(default_factory=bytearray)


class _Answering:
    """A thread that lets in the higher ranks, and turns strangers away."""

    def __init__(self, door: socket.socket, own: Credentials, size: int) -> None:
        self.found: dict[int, socket.socket] = {}
        self.refused: dict[int, Refused] = {}
        self._own = own
        self._wanted = set(range(own.rank + 1, size))
        self._door = door
        self._callers: dict[int, _Caller] = {}
        self._strangers = 0
        self._stopped = False
        self._complete = threading.Event()
        door.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="echelon-door", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether all have come; waits so long for it."""
        return self._complete.wait(seconds)

    def stop(self) -> None:
        """Turn away whoever is still at the door."""
        self._stopped = True
        self._thread.join()
        if self._strangers:
            _log.warning("%d connections of strangers were refused", self._strangers)

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._door, selectors.EVENT_READ)
            try:
                while not self._stopped and self._wanted - self.found.keys():
                    for key, _ in ready.select(_TICK_S):
                        caller = self._callers.get(key.fd)
                        if caller is None:
                            self._open(ready)
                        else:
                            self._hear(ready, caller)
                    self._drop_silent(ready)
            finally:
                for caller in self._callers.values():
                    caller.sock.close()
        self._complete.set()

    def _open(self, ready: selectors.BaseSelector) -> None:
        own = self._own
        try:
            sock, _ = self._door.accept()
        except OSError:
            return
        sock.setblocking(False)
        try:
            if own.contexts is not None:
                sock = _encrypted(sock, own.contexts.answering)
        except OSError:
            self._strangers += 1
            sock.close()
            return
        talk = conversation(view=own.view, rank=own.rank, secret=own.secret, dialled=False)
        caller = _Caller(sock, talk, time.monotonic() + _HANDSHAKE_S)
        caller.awaits = next(talk).awaits
        if len(self._callers) >= _MOST_CALLERS:  # the one that has kept us waiting longest
            self._turn_away(ready, next(iter(self._callers.values())))
        self._callers[sock.fileno()] = caller
        ready.register(sock, selectors.EVENT_READ)
        self._hear(ready, caller)  # under TLS it is we who begin

    def _hear(self, ready: selectors.BaseSelector, caller: _Caller) -> None:
        try:
            data = caller.sock.recv(caller.awaits - len(caller.heard))
            if not data:
                raise HungUp("a caller hung up")
            caller.heard += data
            while len(caller.heard) == caller.awaits:
                turn = caller.talk.send(bytes(caller.heard))
                caller.heard.clear()
                caller.awaits = turn.awaits
                caller.sock.sendall(turn.say)  # less than any socket's buffer
        except StopIteration as end:
            self._let_in(ready, caller, int(end.value))
        except BlockingIOError:
            return
        except Refused as refusal:
            self.refused.update(dict.fromkeys(refusal.ranks, refusal))
            self._turn_away(ready, caller)
        except OSError:
            self._turn_away(ready, caller)

    def _let_in(self, ready: selectors.BaseSelector, caller: _Caller, rank: int) -> None:
        if rank not in self._wanted:
            self._turn_away(ready, caller)
            return
        ready.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]
        if rank in self.found:  # it knows the secret, and has not heard that it was let in
            self.found[rank].close()
        self.found[rank] = caller.sock

    def _turn_away(self, ready: selectors.BaseSelector, caller: _Caller) -> None:
        self._strangers += 1
        ready.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]
        caller.sock.close()

    def _drop_silent(self, ready: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if now > caller.until]:
            self._turn_away(ready, caller)


def _encrypted(sock: socket.socket, context: ssl.SSLContext) -> socket.socket:
    """A caller's socket, behind TLS. Reading from it shakes hands first, as far as bytes are there."""
    sock.getpeername()  # raises if it has hung up already, which wrapping does not bear well
    return context.wrap_socket(sock, do_handshake_on_connect=False)


# Dialling ----------------------------------------------------------------------------------------


def _dial(meeting: Meeting, rank: int, own: Credentials, zone: str, deadline: float) -> socket.socket:
    """Connect with a worker that listens. One that does not answer is tried again, until the deadline."""
    address = _address_of(meeting, rank, own.view, deadline)
    peer, here = str(meeting.members[rank]), str(meeting.me)
    if address.encrypted != (own.contexts is not None):
        which = "was given TLS certificates, this worker was not"
        if not address.encrypted:
            which = "was not given TLS certificates, this worker was"
        raise Refused(f"{peer} {which}", ranks=(rank,), where=here, fix=tls.ALL_OR_NONE)
    if zone and ipaddress.ip_address(address.host).is_link_local:
        address = msgspec.structs.replace(address, host=f"{address.host}%{zone}")
    while True:
        try:
            return _try(address, rank, own, deadline)
        except (OSError, HungUp) as error:
            if isinstance(error, ssl.SSLError) and not isinstance(error, _CUT_OFF):
                raise tls.refusal(error, peer=peer, rank=rank, where=here) from error
            meeting.check_goodbyes()
            if time.monotonic() > deadline:
                raise JoinTimeout(
                    f"{peer} cannot be reached at {address.host} port {address.port}: "
                    f"{error.message if isinstance(error, HungUp) else error}",
                    ranks=(rank,),
                    where=here,
                    fix="check the network and firewalls between the two",
                ) from error
            time.sleep(_POLL_S)


def _try(address: _Address, rank: int, own: Credentials, deadline: float) -> socket.socket:
    left = max(0.1, deadline - time.monotonic())
    peer = socket.create_connection((address.host, address.port), timeout=left)
    until = time.monotonic() + min(_HANDSHAKE_S, left)
    try:
        if own.contexts is not None:
            peer.settimeout(until - time.monotonic())
            peer = own.contexts.dialling.wrap_socket(peer, server_side=True)
        answered = greet(
            peer,
            view=own.view,
            rank=own.rank,
            secret=own.secret,
            dialled=True,
            timeout_s=until - time.monotonic(),
        )
        if answered != rank:
            raise Refused(f"rank {answered} answered where rank {rank} was expected", ranks=(rank,))
    except BaseException:
        peer.close()
        raise
    return peer


def _address_of(meeting: Meeting, rank: int, view: bytes, deadline: float) -> _Address:
    key = f"address/{view.hex()}/{rank}"
    asked = time.monotonic()
    while not meeting.store.check([key]):
        now = time.monotonic()
        if now > deadline:
            raise JoinTimeout(
                f"{meeting.members[rank]} does not listen", ranks=(rank,), where=str(meeting.me)
            )
        if now > asked + _ASK_S:
            meeting.check_goodbyes()
            asked = now
        time.sleep(_POLL_S)
    return msgspec.json.decode(meeting.store.get(key), type=_Address)


@contextlib.contextmanager
def _store_there(meeting: Meeting) -> Iterator[None]:
    """The store goes with the leader."""
    try:
        yield
    except (DistError, RuntimeError) as error:
        raise JoinTimeout(
            f"{meeting.members[0]} left while the others were joining",
            ranks=(0,),
            where=str(meeting.me),
            fix="see its log",
        ) from error


def _close(sockets: Mapping[int, socket.socket]) -> None:
    for one in sockets.values():
        one.close()
