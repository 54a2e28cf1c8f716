"""Who calls at a listening port, and has not proved yet that it belongs to the run?

Handshakes of all callers go on at the same time, and none blocks. A stranger costs little, whatever it does:
there are at most so many at once, each has a few seconds, and only the bytes of a handshake are read. When
there are too many, the address with the most callers loses its oldest one, so that a flood from one machine
does not push out the callers of others. Beyond a rate of new connections, the port waits.
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

HANDSHAKE_S = 5.0
MOST_STRANGERS = 128
_ACCEPTED_AT_ONCE = 32
_PER_S = 500.0
_PAUSE_S = 0.05

Talk = Generator[HandshakeStep, bytes, Proven]


@dataclass(slots=True)
class _Caller:
    """An incoming connection and the state of its handshake."""

    sock: socket.socket
    address: str
    talk: Talk
    until: float
    awaits: int = 0
    heard: bytearray = field(default_factory=bytearray)


class Strangers:
    """The callers of one or more listeners, which `ready` watches together with whatever else.

    `talk` begins a handshake; `proven` gets the sockets of those that proved themselves, unregistered;
    `rejected` gets the reason and the address of each one that did not.
    """

    def __init__(
        self,
        ready: selectors.BaseSelector,
        *,
        talk: Callable[[], Talk],
        proven: Callable[[socket.socket, Proven], None],
        rejected: Callable[[Refused | None, str], None],
        context: ssl.SSLContext | None = None,
        most: int = MOST_STRANGERS,
        limit_s: float = HANDSHAKE_S,
    ) -> None:
        self._ready = ready
        self._talk = talk
        self._proven = proven
        self._rejected = rejected
        self._context = context
        self._most = most
        self._limit_s = limit_s
        self._callers: dict[int, _Caller] = {}
        self._allowance = _PER_S
        self._counted_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._callers)

    def accept(self, listener: socket.socket) -> None:
        """Let in who waits at a listener that does not block: a few at a time, at a limited rate."""
        now = time.monotonic()
        self._allowance = min(_PER_S, self._allowance + (now - self._counted_at) * _PER_S)
        self._counted_at = now
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._allowance < 1:
                time.sleep(_PAUSE_S)
                return
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no file is left, or the caller is gone
                time.sleep(_PAUSE_S)
                return
            self._allowance -= 1
            self._open(sock, str(address[0]))

    def hears(self, fd: int) -> bool:
        """Whether this is a caller's connection; if so, go on with its handshake."""
        caller = self._callers.get(fd)
        if caller is not None:
            self._hear(caller)
        return caller is not None

    def drop_late(self) -> None:
        """Close the connections of those that took too long."""
        now = time.monotonic()
        for caller in [caller for caller in self._callers.values() if now > caller.until]:
            self._reject(caller)

    def close(self) -> None:
        """Close all connections."""
        for caller in list(self._callers.values()):
            self._ready.unregister(caller.sock)
            caller.sock.close()
        self._callers.clear()

    def _open(self, sock: socket.socket, address: str) -> None:
        sock.setblocking(False)
        try:
            if self._context is not None:
                sock.getpeername()  # raises if the peer is gone; wrap_socket would raise a less clear error
                sock = self._context.wrap_socket(sock, do_handshake_on_connect=False)
        except OSError:
            sock.close()
            self._rejected(None, address)
            return
        caller = _Caller(sock, address, self._talk(), time.monotonic() + self._limit_s)
        caller.awaits = next(caller.talk).awaits
        if len(self._callers) >= self._most:
            self._reject(self._oldest_of_the_most_frequent())
        self._callers[sock.fileno()] = caller
        self._ready.register(sock, selectors.EVENT_READ)
        self._hear(caller)  # under TLS the answering side sends first

    def _oldest_of_the_most_frequent(self) -> _Caller:
        most = Counter(caller.address for caller in self._callers.values()).most_common(1)[0][0]
        return next(caller for caller in self._callers.values() if caller.address == most)

    def _hear(self, caller: _Caller) -> None:
        try:
            data = caller.sock.recv(caller.awaits - len(caller.heard))
            if not data:
                raise HungUp("a peer closed the connection during the handshake")
            caller.heard += data
            while len(caller.heard) == caller.awaits:
                step = caller.talk.send(bytes(caller.heard))
                caller.heard.clear()
                caller.awaits = step.awaits
                caller.sock.sendall(step.say)  # shorter than any socket's buffer
        except StopIteration as end:
            self._forget(caller)
            self._proven(caller.sock, end.value)
        except BlockingIOError:
            return
        except Refused as refusal:
            self._reject(caller, refusal)
        except OSError:
            self._reject(caller)

    def _forget(self, caller: _Caller) -> None:
        self._ready.unregister(caller.sock)
        del self._callers[caller.sock.fileno()]

    def _reject(self, caller: _Caller, refusal: Refused | None = None) -> None:
        self._forget(caller)
        caller.sock.close()
        self._rejected(refusal, caller.address)
