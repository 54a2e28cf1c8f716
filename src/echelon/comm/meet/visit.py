"""How does a worker reach the leader's meeting service, and ask it? One connection for each worker.

The worker dials, proves that it knows the run's secret, and so does the leader; then each message is
sealed. Every request has a deadline: after it, or when the connection breaks, the meeting has ended for
this worker.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

from echelon.comm.meet import tls
from echelon.comm.meet.board import (
    LONGEST_MESSAGE_BYTES,
    BoardError,
    BoardStore,
    MeetingBoard,
    Reply,
    Request,
    decode_reply,
    encode,
)
from echelon.comm.meet.credentials import Credentials, Link
from echelon.comm.meet.handshake import HungUp, Refused, greet
from echelon.comm.meet.strangers import HANDSHAKE_S, check_opening, opening
from echelon.comm.wire.sealed import MessageReader, MessageWriter
from echelon.errors import Corrupt, WorkerError

_AGAIN_S = 0.05
_READ_BYTES = 1 << 16
_LEADER = "the leader"


class LeaderStore(BoardStore):
    """The board in the leader's own process."""

    def __init__(self, board: MeetingBoard, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._board = board

    def ask(self, request: Request) -> Reply:
        """At once."""
        return self._board.answer(request)


class VisitorStore(BoardStore):
    """The board of the leader, over a connection."""

    def __init__(self, link: Link, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._sock = link.sock
        self._lock = threading.Lock()  # a session and its background threads ask
        self._writer = MessageWriter(link.keys)
        self._reader = MessageReader(link.keys, peer=_LEADER, longest_bytes=LONGEST_MESSAGE_BYTES)
        self._ended = ""
        self._unanswered = 0

    def __del__(self) -> None:
        self._sock.close()

    def ask(self, request: Request) -> Reply:
        """Send the request and wait for the reply."""
        message = encode(request)
        if len(message) > LONGEST_MESSAGE_BYTES:
            raise WorkerError(f"a message of {len(message)} bytes is too long for the meeting")
        with self._lock:
            if self._ended:
                raise BoardError(f"the leader's meeting has ended: {self._ended}")
            try:
                return self._exchange(message)
            except (OSError, Corrupt) as error:
                self._ended = error.message if isinstance(error, Corrupt) else str(error)
                self._sock.close()
                raise BoardError(f"the leader's meeting has ended: {self._ended}") from error

    def _exchange(self, message: bytes) -> Reply:
        deadline = time.monotonic() + self._timeout_s
        self._sock.settimeout(self._timeout_s)
        self._ended = "a request was interrupted"  # by a signal, half sent
        self._sock.sendall(self._writer.sealed(message))
        self._ended = ""
        self._unanswered += 1
        while True:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("the leader has left")
            for reply in self._reader.messages(data):
                self._unanswered -= 1
                if not self._unanswered:  # else a signal interrupted the wait for this one
                    return decode_reply(reply, peer=_LEADER)


def visit(
    where: Callable[[], tuple[str, int] | None], own: Credentials, *, timeout_s: float
) -> VisitorStore | None:
    """Dial the leader until it answers; None if it does not in time.

    Refused if it does not know the secret.

    `where` says where it is, each time anew; None: not known yet.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        place = where()
        try:
            if place is not None:
                return VisitorStore(_dial(place, own, deadline), timeout_s=timeout_s)
        except (OSError, WorkerError) as error:
            _raise_if_final(error, f"{_LEADER} at {place}")
        if time.monotonic() > deadline:
            return None
        time.sleep(_AGAIN_S)


def _raise_if_final(error: Exception, peer: str) -> None:
    """Raise what another attempt would not change; who hangs up may be about to end, or to begin."""
    if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        raise tls.refusal(error, peer=peer, rank=0, where="the meeting") from error
    if isinstance(error, WorkerError) and not isinstance(error, HungUp):
        raise error


def _dial(place: tuple[str, int], own: Credentials, deadline: float) -> Link:
    until = min(deadline, time.monotonic() + HANDSHAKE_S)
    sock = socket.create_connection(place, timeout=max(0.1, until - time.monotonic()))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.getsockname() == sock.getpeername():  # a connection to itself: nobody listens there
            raise ConnectionRefusedError
        _open(sock, own, until)
        if own.contexts is not None:
            sock.settimeout(max(0.1, until - time.monotonic()))
            sock = own.contexts.dialling.wrap_socket(sock, server_side=True)
            tls.check_names(sock, (place[0], str(sock.getpeername()[0])), rank=0)
        proven = greet(sock, own.talk(sock, dialled=True), timeout_s=max(0.1, until - time.monotonic()))
        if proven.rank != 0:
            raise Refused(f"rank {proven.rank} answered where rank 0 was expected", ranks=(0,))
    except BaseException:
        sock.close()
        raise
    return own.link(sock, proven)


def _open(sock: socket.socket, own: Credentials, until: float) -> None:
    encrypted = own.contexts is not None
    mine = opening(encrypted=encrypted)
    sock.sendall(mine)
    heard = b""
    while len(heard) < len(mine):
        sock.settimeout(max(0.1, until - time.monotonic()))
        data = sock.recv(len(mine) - len(heard))
        if not data:
            raise HungUp("a peer closed the connection during the handshake")
        heard += data
    check_opening(heard, encrypted=encrypted, peer=_LEADER)
