"""How do members on another machine reach the launcher's service? Their agent passes on what they say.

Members open connections to a socket of their agent's, as they do to the launcher's on its own machine. What
comes there travels over the agent's channel, and the launcher answers as if it came to its own socket.
`MemberStreams` is one side of that, either one; `MemberRelay` is all that an agent has for its members.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Collection
from pathlib import Path

from echelon.start.agents.protocol import (
    MemberGone,
    MemberOpened,
    MemberSaid,
    Message,
    Progressed,
    Publish,
    Published,
    WorkerProgress,
)
from echelon.start.member_board import is_stopped, socket_in
from echelon.train.admission import ADMISSION_VARIABLE, AdmissionFlag
from echelon.train.progress import PROGRESS_VARIABLE, ProgressTable
from echelon.train.service import ADDRESS_VARIABLE, SILENT_VARIABLE

_READ_BYTES = 1 << 18


class MemberStreams:
    """Sockets whose bytes travel over a channel, by number. `send` sends a message there."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._sockets: dict[int, socket.socket] = {}
        self._unsent: dict[int, bytearray] = {}

    def add(self, number: int, sock: socket.socket) -> None:
        """Carry this one from now on."""
        sock.setblocking(False)
        self._sockets[number] = sock
        self._unsent[number] = bytearray()

    @property
    def sockets(self) -> list[socket.socket]:
        """Those that may have something to be carried."""
        return list(self._sockets.values())

    @property
    def blocked(self) -> list[socket.socket]:
        """Those that have not taken yet what came for them."""
        return [self._sockets[number] for number, unsent in self._unsent.items() if unsent]

    def hear(self, message: MemberSaid | MemberGone) -> None:
        """The other side of the channel has said this."""
        if message.connection not in self._sockets:
            return
        if isinstance(message, MemberGone):
            self._drop(message.connection)
        else:
            self._unsent[message.connection] += message.data
            self._give(message.connection)

    def carry(self) -> None:
        """Carry what can be carried now, in both directions."""
        for number, sock in list(self._sockets.items()):
            self._give(number)
            with contextlib.suppress(BlockingIOError):
                data = self._read(sock)
                if data:
                    self._send(MemberSaid(number, data))
                else:
                    self._drop(number)
                    self._send(MemberGone(number))

    def close(self) -> None:
        """Close all; safe to call twice."""
        for number in list(self._sockets):
            self._drop(number)

    def _read(self, sock: socket.socket) -> bytes:
        try:
            return sock.recv(_READ_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return b""

    def _give(self, number: int) -> None:
        unsent = self._unsent.get(number)
        with contextlib.suppress(OSError):  # it is full, or closed, which reading will show
            while unsent:
                sent = self._sockets[number].send(unsent[:_READ_BYTES])
                del unsent[:sent]

    def _drop(self, number: int) -> None:
        self._sockets.pop(number).close()
        del self._unsent[number]


class MemberRelay:
    """What members on this machine need of their launcher; `folder` is nobody else's.

    After `silent_s` without a sign of another machine its workers are lost.
    """

    def __init__(self, folder: Path, send: Callable[[Message], None], *, silent_s: float) -> None:
        self._silent_s = silent_s
        self._flag = AdmissionFlag.create(folder / "admission")
        self._table = ProgressTable(folder / "progress")
        self._listener = socket_in(folder)
        self._listener.setblocking(False)
        self._send = send
        self._streams = MemberStreams(send)
        self._opened = 0

    @property
    def environment(self) -> dict[str, str]:
        """Where workers find it."""
        return {
            ADDRESS_VARIABLE: str(self._listener.getsockname()),
            ADMISSION_VARIABLE: str(self._flag.file),
            PROGRESS_VARIABLE: str(self._table.file),
            SILENT_VARIABLE: f"{self._silent_s:g}",
        }

    @property
    def sockets(self) -> list[socket.socket]:
        """What may have something to be carried."""
        return [self._listener, *self._streams.sockets]

    @property
    def blocked(self) -> list[socket.socket]:
        """What has not taken yet what came for it."""
        return self._streams.blocked

    def hear(self, message: MemberSaid | MemberGone | Publish) -> None:
        """The launcher has said this. All is done in the order in which it came."""
        if isinstance(message, Publish):
            self._flag.waiting, self._flag.round = message.waiting, message.after_round
            self._send(Published(message.number))
        else:
            self._streams.hear(message)

    def carry(self) -> None:
        """Let in who calls, and carry what can be carried now."""
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                self._opened += 1
                self._streams.add(self._opened, sock)
                self._send(MemberOpened(self._opened))
        self._streams.carry()

    def clear(self, rank: int) -> None:
        """The worker has ended."""
        self._table.clear(rank)

    def progress(self, ranks: Collection[int]) -> Progressed:
        """How far these workers are."""
        found = []
        for rank in ranks:
            told = self._table.read(rank)
            if told is not None:
                seen, stopped = told[1], is_stopped(self._table, rank)
                found.append(
                    WorkerProgress(rank, seen.operation, seen.phase, seen.batches, seen.rounds, stopped)
                )
        return Progressed(found)

    def close(self) -> None:
        """Answer nobody any more."""
        self._listener.close()
        self._streams.close()
