"""The leader's meeting service: a thread that answers the requests of workers that have proved themselves.

Whoever calls proves first that it knows the run's secret (`strangers.py`); until then it can read and
change nothing. After that, each message is sealed with the connection's keys, or travels inside TLS. What a
worker sends is read as a typed request (`board.py`), and the board answers it.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
from collections.abc import Sequence

from echelon.comm.meet.board import LONGEST_MESSAGE_BYTES, MeetingBoard, SetValue, decode_request, encode
from echelon.comm.meet.credentials import Credentials, Link
from echelon.comm.meet.handshake import Proven, Refused
from echelon.comm.meet.strangers import Strangers
from echelon.comm.wire.sealed import MessageReader, MessageWriter
from echelon.errors import Corrupt

_TICK_S = 0.1
_READ_BYTES = 1 << 16
_MOST_LOGGED = 5
_STOP_S = 2.0
_log = logging.getLogger(__name__)


def refused_key(rank: int) -> str:
    """Where the board says why a caller that named this rank was refused."""
    return f"refused/{rank}"


class _Visitor:
    """The connection of a worker that has proved itself."""

    def __init__(self, link: Link, rank: int) -> None:
        self.sock = link.sock
        self.name = f"rank {rank}"
        self.unsent = bytearray()
        self.reader = MessageReader(link.keys, peer=self.name, longest_bytes=LONGEST_MESSAGE_BYTES)
        self.writer = MessageWriter(link.keys)


class MeetingService:
    """Serves a board at listening sockets, which it closes in the end. `size` is that of the run."""

    def __init__(self, listeners: Sequence[socket.socket], own: Credentials, *, size: int) -> None:
        self.board = MeetingBoard()
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._own = own
        self._size = size
        self._rejected = 0
        self._visitors: dict[int, _Visitor] = {}
        self._ready = selectors.DefaultSelector()
        self._strangers = Strangers(
            self._ready,
            talk=lambda sock: own.talk(sock, dialled=False),
            proven=self._admit,
            rejected=self._reject,
            context=own.contexts.answering if own.contexts is not None else None,
            opens=True,
        )
        self._wake, self._woken = socket.socketpair()
        self._stopped = False
        self._ready.register(self._woken, selectors.EVENT_READ)
        for listener in listeners:
            listener.setblocking(False)
            self._ready.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="echelon-meeting", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return int(next(iter(self._listeners.values())).getsockname()[1])

    def stop(self) -> None:
        """End the meeting, and close all its connections."""
        self._stopped = True
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            while not self._stopped:
                for key, events in self._ready.select(_TICK_S):
                    if key.fd in self._listeners:
                        self._strangers.accept(self._listeners[key.fd])
                    elif key.fd in self._visitors:
                        self._serve(self._visitors[key.fd], events)
                    else:
                        self._strangers.hears(key.fd)
                self._strangers.tick()
        finally:
            self._close()

    def _close(self) -> None:
        self._strangers.close()
        for visitor in self._visitors.values():
            visitor.sock.close()
        for listener in self._listeners.values():
            listener.close()
        self._ready.close()
        self._wake.close()
        self._woken.close()
        if self._rejected > 1:
            _log.warning("rejected %d connections that are not from this run's workers", self._rejected)

    def _admit(self, sock: socket.socket, proven: Proven) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        visitor = _Visitor(self._own.link(sock, proven), proven.rank)
        self._visitors[sock.fileno()] = visitor
        self._ready.register(sock, selectors.EVENT_READ)

    def _reject(self, refusal: Refused | None, address: str) -> None:
        """Count it, and say it a few times only: a stranger must not fill the log."""
        self._rejected += 1
        if refusal is not None:
            for rank in refusal.ranks:
                if rank < self._size:
                    self.board.answer(SetValue(refused_key(rank), refusal.message.encode()))
        if self._rejected <= _MOST_LOGGED:
            why = refusal.message if refusal is not None else "it did not say in time who it is"
            last = "; further ones are only counted" if self._rejected == _MOST_LOGGED else ""
            _log.warning("rejected a connection from %s: %s%s", address, why, last)

    def _serve(self, visitor: _Visitor, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._hear(visitor)
            self._send(visitor)
        except BlockingIOError:
            return
        except (OSError, Corrupt) as error:
            if isinstance(error, Corrupt):
                _log.warning("closed the connection of %s to the meeting: %s", visitor.name, error.message)
            self._ready.unregister(visitor.sock)
            del self._visitors[visitor.sock.fileno()]
            visitor.sock.close()

    def _hear(self, visitor: _Visitor) -> None:
        """Answer what has come. A worker sends its next request when it has the reply."""
        with contextlib.suppress(BlockingIOError):
            while True:  # under TLS, what is decrypted already is not seen by select
                data = visitor.sock.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError
                for message in visitor.reader.messages(data):
                    reply = self.board.answer(decode_request(message, peer=visitor.name))
                    visitor.unsent += visitor.writer.sealed(encode(reply))
                if len(visitor.unsent) > LONGEST_MESSAGE_BYTES:
                    return

    def _send(self, visitor: _Visitor) -> None:
        while visitor.unsent:
            try:
                sent = visitor.sock.send(visitor.unsent)
            except BlockingIOError:
                self._ready.modify(visitor.sock, selectors.EVENT_WRITE)  # no further request until then
                return
            del visitor.unsent[:sent]
        self._ready.modify(visitor.sock, selectors.EVENT_READ)
