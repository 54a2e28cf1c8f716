"""One TCP connection to one peer, cut into frames; driven by the loop's thread, never blocking.

Outgoing messages queue by priority, and a more urgent one overtakes between two frames. An incoming payload
goes straight to where it belongs if somebody waits for it: into the buffer, or into a cache-sized piece of
memory from which it is added. What nobody waits for yet is kept aside, up to a limit; beyond it the peer
is not read from, and TCP makes it wait.
"""

from __future__ import annotations

import heapq
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from echelon.comm import frames
from echelon.comm.frames import HEADER_BYTES, Header
from echelon.errors import Corrupt

_ASIDE_BYTES = 64 << 20
_FRAMES_AT_ONCE = 16

Key = tuple[int, int]  # operation, message


class Sink(ABC):
    """Where the payload of one message goes."""

    size_bytes: int

    @abstractmethod
    def place(self, offset: int, length: int) -> memoryview | None:
        """The final place of these bytes, or None if they must be handed to `take` instead."""

    @abstractmethod
    def take(self, offset: int, data: memoryview) -> None:
        """Use bytes that could not be put in their final place."""

    @abstractmethod
    def finished(self) -> None:
        """All bytes are there."""


@dataclass(slots=True)
class _Incoming:
    """A message that somebody waits for."""

    sink: Sink
    received: int = 0


@dataclass(slots=True)
class _Outgoing:
    """A message on its way out."""

    key: Key
    data: memoryview
    sent: Callable[[], None]
    at: int = 0


_Queued = tuple[int, int, _Outgoing]  # priority, order of queueing, message


class Connection:
    """Frames to and from one peer."""

    def __init__(
        self, sock: socket.socket, *, view: bytes, peer: str, frame_bytes: int = frames.FRAME_BYTES
    ) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self.frame_bytes = frame_bytes
        self.sent_bytes = 0
        self.received_bytes = 0
        self.refused = 0
        self._view = view
        # Going out.
        self._queue: list[_Queued] = []
        self._order = 0
        self._sequence_out = 0
        self._parts: list[memoryview] = []
        self._current: _Queued | None = None
        # Coming in.
        self._expected: dict[Key, _Incoming] = {}
        self._aside: dict[Key, list[tuple[int, bytearray]]] = {}
        self._aside_bytes = 0
        self._sequence_in = 0
        self._header_bytes = bytearray(HEADER_BYTES)
        self._piece = bytearray(frames.FRAME_BYTES)
        self._header: Header | None = None
        self._target = memoryview(b"")
        self._in_place = False
        self._have = 0
        self.paused = False
        self.progressed = False
        self.interest = select.EPOLLIN

    # Going out -----------------------------------------------------------------------------------

    def send(self, key: Key, data: memoryview, priority: int, sent: Callable[[], None]) -> None:
        """Queue a message; `sent` is called when the kernel has all of it."""
        self._order += 1
        heapq.heappush(self._queue, (priority, self._order, _Outgoing(key, data, sent)))

    @property
    def wants_to_write(self) -> bool:
        """Whether anything is queued."""
        return bool(self._parts or self._current or self._queue)

    def write(self) -> None:
        """Write what the kernel takes, a few frames at most; `progressed`: it took all of them."""
        self.progressed = False
        for _ in range(_FRAMES_AT_ONCE):
            if not self._parts and not self._next_frame():
                break
            try:
                count = self.sock.sendmsg(self._parts)
            except BlockingIOError:
                return
            self.sent_bytes += count
            self._advance(count)
        self.progressed = True

    def _next_frame(self) -> bool:
        if self._current is None:
            if not self._queue:
                return False
            self._current = heapq.heappop(self._queue)
        else:  # an urgent message overtakes between two frames
            self._current = heapq.heappushpop(self._queue, self._current)
        message = self._current[2]
        payload = message.data[message.at : message.at + self.frame_bytes]
        header = Header(
            self._view,
            self._sequence_out,
            *message.key,
            message.at,
            len(payload),
            frames.checksum(payload),
        )
        self._sequence_out += 1
        message.at += len(payload)
        self._parts = [memoryview(header.pack()), payload]
        return True

    def _advance(self, count: int) -> None:
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.pop(0))
        if self._parts:
            self._parts[0] = self._parts[0][count:]
            return
        assert self._current is not None
        message = self._current[2]
        if message.at >= len(message.data):
            self._current = None
            message.sent()

    # Coming in -----------------------------------------------------------------------------------

    def expect(self, key: Key, sink: Sink) -> None:
        """Say where a message is to go; what came early goes there now."""
        incoming = self._expected[key] = _Incoming(sink)
        for offset, data in self._aside.pop(key, ()):
            self._aside_bytes -= len(data)
            _hand_over(sink, offset, memoryview(data))
            self._count(key, incoming, len(data))
        self.paused = self._aside_bytes > _ASIDE_BYTES

    def waits_for(self, operation: int) -> bool:
        """Whether anything of this operation is still to come from this peer."""
        return any(key[0] == operation for key in self._expected)

    def forget(self, operation: int) -> None:
        """Drop all that belongs to an operation that was given up."""
        for key in [key for key in self._expected if key[0] == operation]:
            del self._expected[key]
        for key in [key for key in self._aside if key[0] == operation]:
            self._aside_bytes -= sum(len(data) for _, data in self._aside.pop(key))

    def read(self) -> None:
        """Read what the kernel has. Raises ConnectionError when the peer is gone, Corrupt when it errs."""
        for _ in range(_FRAMES_AT_ONCE):
            if self.paused:
                return
            if self._header is None and not self._read_header():
                return
            if not self._read_payload():
                return

    def _read_header(self) -> bool:
        try:
            count = self.sock.recv_into(memoryview(self._header_bytes)[self._have :])
        except BlockingIOError:
            return False
        if not count:
            raise ConnectionResetError("the peer closed the connection")
        self._have += count
        self.received_bytes += count
        if self._have < HEADER_BYTES:
            return False
        self._have = 0
        self._header = frames.unpack(
            self._header_bytes, view=self._view, sequence=self._sequence_in, peer=self.peer
        )
        self._sequence_in += 1
        self._choose_target(self._header)
        return True

    def _choose_target(self, header: Header) -> None:
        """The memory that the payload is received into: its final place, if that is known."""
        incoming = self._expected.get((header.operation, header.message))
        if incoming is not None:
            if header.offset + header.length > incoming.sink.size_bytes:
                raise Corrupt(
                    f"{self.peer} sent more than was asked for", where=f"message {header.message}"
                )
            target = incoming.sink.place(header.offset, header.length)
            if target is not None:
                self._target, self._in_place = target, True
                return
        if header.length > len(self._piece):
            self._piece = bytearray(header.length)
        self._target, self._in_place = memoryview(self._piece)[: header.length], False

    def _read_payload(self) -> bool:
        header, target = self._header, self._target
        assert header is not None
        while self._have < header.length:
            try:
                count = self.sock.recv_into(target[self._have :])
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            self._have += count
            self.received_bytes += count
        self._have, self._header = 0, None
        if frames.checksum(target) != header.checksum:
            self.refused += 1
            raise Corrupt(f"{self.peer} sent a damaged frame", where=f"frame {header.sequence}")
        self._deliver(header, target)
        return True

    def _deliver(self, header: Header, data: memoryview) -> None:
        key = (header.operation, header.message)
        incoming = self._expected.get(key)
        if incoming is None:
            self._aside.setdefault(key, []).append((header.offset, bytearray(data)))
            self._aside_bytes += len(data)
            self.paused = self._aside_bytes > _ASIDE_BYTES
            return
        if not self._in_place:
            _hand_over(incoming.sink, header.offset, data)
        self._count(key, incoming, header.length)

    def _count(self, key: Key, incoming: _Incoming, length: int) -> None:
        incoming.received += length
        if incoming.received >= incoming.sink.size_bytes:
            del self._expected[key]
            incoming.sink.finished()


def _hand_over(sink: Sink, offset: int, data: memoryview) -> None:
    target = sink.place(offset, len(data))
    if target is None:
        sink.take(offset, data)
    else:
        target[:] = data
