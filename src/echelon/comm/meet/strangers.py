"""Who calls at a listening port, and has not proved yet that it belongs to the run?

Handshakes of all callers go on at the same time, and none blocks. A stranger costs little, whatever it
does: there are at most so many at once, each has a few seconds, and only the bytes of a handshake are read.
When there are too many, the address with the most callers loses its oldest one, so that a flood from one
machine does not push out the callers of others. Beyond a rate of new connections, the port waits, and those
that have proved themselves are served meanwhile.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from echelon.comm.meet.handshake import HandshakeStep, HungUp, Proven, Refused
from echelon.comm.meet.tls import ALL_OR_NONE

HANDSHAKE_S = 5.0
MOST_STRANGERS = 128
_ACCEPTED_AT_ONCE = 32
_PER_S = 500.0
_PAUSE_S = 0.05
_OPENING = b"ECHM"

Talk = Generator[HandshakeStep, bytes, Proven]


@dataclass(slots=True)
class _Caller:
    """An incoming connection and the state of its handshake."""

    sock: socket.socket
    address: str
    until: float
    talk: Talk | None = None
    awaits: int = 0
    heard: bytearray = field(default_factory=bytearray)


def opening(*, encrypted: bool) -> bytes:
    """The first bytes of both sides: what speaks, and whether TLS follows, so that a mismatch is said."""
    return _OPENING + (b"T" if encrypted else b"-")


def check_opening(theirs: bytes, *, encrypted: bool, peer: str) -> None:
    """Raise Refused if the peer is no worker, or uses TLS where this worker does not."""
    if theirs[: len(_OPENING)] != _OPENING or len(theirs) != len(_OPENING) + 1:
        raise Refused(f"{peer} is not an Echelon worker, or of another version")
    if theirs != opening(encrypted=encrypted):
        which = "was not given TLS certificates, this worker was"
        if not encrypted:
            which = "was given TLS certificates, this worker was not"
        raise Refused(f"{peer} {which}", fix=ALL_OR_NONE)


class Strangers:
    """The callers of one or more listeners, which `ready` watches together with whatever else.

    `talk` begins a handshake; `proven` gets the sockets of those that proved themselves, unregistered;
    `rejected` gets the reason and the address of each one that did not. `opens`: both sides begin with
    `opening`, which is not encrypted.
    """

    def __init__(
        self,
        ready: selectors.BaseSelector,
        *,
        talk: Callable[[socket.socket], Talk],
        proven: Callable[[socket.socket, Proven], None],
        rejected: Callable[[Refused | None, str], None],
        context: ssl.SSLContext | None = None,
        opens: bool = False,
        most: int = MOST_STRANGERS,
        limit_s: float = HANDSHAKE_S,
    ) -> None:
        self._ready = ready
        self._talk = talk
        self._proven = proven
        self._rejected = rejected
        self._context = context
        self._opens = opens
        self._most = most
        self._limit_s = limit_s
        self._callers: dict[int, _Caller] = {}
        self._allowance = _PER_S
        self._counted_at = time.monotonic()
        self._resting: dict[socket.socket, float] = {}

    def __len__(self) -> int:
        return len(self._callers)

    def accept(self, listener: socket.socket) -> None:
        """Let in who waits at a listener that does not block: a few at a time, at a limited rate."""
        now = time.monotonic()
        self._allowance = min(_PER_S, self._allowance + (now - self._counted_at) * _PER_S)
        self._counted_at = now
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._allowance < 1:
                self._rest(listener)
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file is left, or the caller is gone
                self._rest(listener)
                return
            self._allowance -= 1
            self._open(sock, str(address[0]))

    def _rest(self, listener: socket.socket) -> None:
        """Do not look at a listener for a moment."""
        self._ready.unregister(listener)
        self._resting[listener] = time.monotonic() + _PAUSE_S

    def hears(self, fd: int) -> bool:
        """Whether this is a caller's connection; if so, go on with its handshake."""
        caller = self._callers.get(fd)
        if caller is not None:
            self._hear(caller)
        return caller is not None

    def tick(self) -> None:
        """Close the connections of those that took too long, and look at listeners again; call it often."""
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if now > caller.until]:
            self._reject(caller)
        for listener in [listener for listener, until in self._resting.items() if now > until]:
            del self._resting[listener]
            self._ready.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Close all connections."""
        for caller in list(self._callers.values()):
            self._ready.unregister(caller.sock)
            caller.sock.close()
        self._callers.clear()

    def _open(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        caller = _Caller(sock, address, time.monotonic() + self._limit_s)
        if len(self._callers) >= self._most:
            self._reject(self._oldest_of_the_most_frequent())
        self._callers[sock.fileno()] = caller
        self._ready.register(sock, selectors.EVENT_READ)
        if self._opens:
            caller.awaits = len(opening(encrypted=False))
        elif self._begin(caller):
            self._hear(caller)  # under TLS the answering side sends first

    def _begin(self, caller: _Caller) -> bool:
        """Begin the handshake; False if the caller is gone."""
        if self._context is not None:
            fd = caller.sock.fileno()
            self._ready.unregister(caller.sock)
            try:
                caller.sock.getpeername()  # if the peer is gone, wrap_socket would raise a less clear error
                caller.sock = self._context.wrap_socket(caller.sock, do_handshake_on_connect=False)
            except OSError:
                del self._callers[fd]
                caller.sock.close()
                self._rejected(None, caller.address)
                return False
            self._ready.register(caller.sock, selectors.EVENT_READ)
        caller.talk = self._talk(caller.sock)
        caller.awaits = next(caller.talk).awaits
        return True

    def _oldest_of_the_most_frequent(self) -> _Caller:
        most = Counter(caller.address for caller in self._callers.values()).most_common(1)[0][0]
        return next(caller for caller in self._callers.values() if caller.address == most)

    def _hear(self, caller: _Caller) -> None:
        try:
            while True:
                data = caller.sock.recv(caller.awaits - len(caller.heard))
                if not data:
                    raise HungUp("a peer closed the connection during the handshake")
                caller.heard += data
                if len(caller.heard) == caller.awaits and not self._proceed(caller):
                    return
        except StopIteration as end:
            self._forget(caller)
            self._proven(caller.sock, end.value)
        except BlockingIOError:
            return
        except Refused as refusal:
            self._reject(caller, refusal)
        except OSError:
            self._reject(caller)

    def _proceed(self, caller: _Caller) -> bool:
        """Take the next step, for which all bytes have come; False if the caller is gone."""
        heard = bytes(caller.heard)
        caller.heard.clear()
        if caller.talk is None:
            encrypted = self._context is not None
            caller.sock.sendall(opening(encrypted=encrypted))
            check_opening(heard, encrypted=encrypted, peer=f"a caller from {caller.address}")
            return self._begin(caller)
        while True:
            step = caller.talk.send(heard)
            caller.awaits = step.awaits
            caller.sock.sendall(step.say)  # shorter than any socket's buffer
            if step.awaits:
                return True
            heard = b""

    def _forget(self, caller: _Caller) -> None:
        self._ready.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]

    def _reject(self, caller: _Caller, refusal: Refused | None = None) -> None:
        self._forget(caller)
        caller.sock.close()
        self._rejected(refusal, caller.address)
