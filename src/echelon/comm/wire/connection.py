"""One TCP connection to one peer, cut into frames; driven by the loop's thread, never blocking.

Outgoing messages queue by priority, and a more urgent one overtakes between two frames. The payload of an
expected message goes straight to its place: into the buffer, or into a cache-sized piece of memory from
which it is added. Messages that are not expected yet are kept aside. Beyond a limit, and while nothing is
expected, the connection is not read, and TCP makes the peer wait.

The socket may be a TLS socket (`tls.py`). Bytes may then wait in the socket object, where the kernel does
not see them and does not wake the loop: `read` never leaves any there.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from echelon.comm.meet import tls
from echelon.comm.wire import frames, notices
from echelon.comm.wire.frames import HEADER_BYTES, NOTICES, Header
from echelon.comm.wire.mismatch import SAME_TENSORS
from echelon.comm.wire.notices import Notice
from echelon.comm.wire.seals import PAYLOAD, Keys, seals_of
from echelon.errors import Corrupt, MismatchedCalls, StaleView

_ASIDE_BYTES = 64 << 20
_FRAMES_AT_ONCE = 16
_MOST_NOTICE_BYTES = 64 << 10
_WORTH_WAKING_BYTES = 512 << 10
_FRAME_S = 4e-3  # how long an urgent message waits for another's frame at most
_LEAST_FRAME_BYTES = 64 << 10
_TCP_NOTSENT_LOWAT = 25  # Linux; the socket module names it from 3.12 on
_FIRST = -(1 << 62)  # the priority of notices

Key = tuple[int, int]  # operation, message


class Sink(ABC):
    """Where the payload of one message goes, frame by frame from its beginning to its end.

    `agreed`: all workers that make the same call know the size, so a message of another size is of another
    call.
    """

    size_bytes: int
    agreed = False

    def accepts(self, size_bytes: int) -> bool:
        """Whether a message of this size may go here."""
        return size_bytes == self.size_bytes

    @abstractmethod
    def place(self, offset: int, length: int) -> memoryview | None:
        """The final place of these bytes, or None if they must be handed to `take` instead."""

    @abstractmethod
    def take(self, offset: int, data: memoryview) -> None:
        """Use bytes that have no final place yet. The memory is the caller's afterwards."""

    @abstractmethod
    def finished(self) -> None:
        """All bytes have arrived."""


class Whole(Sink):
    """Receives a message into given memory and calls `done`."""

    def __init__(self, memory: memoryview, done: Callable[[], None], *, agreed: bool = False) -> None:
        self.size_bytes = len(memory)
        self.agreed = agreed
        self._memory = memory
        self._done = done

    def place(self, offset: int, length: int) -> memoryview | None:
        """That part of the memory."""
        return self._memory[offset : offset + length]

    def take(self, offset: int, data: memoryview) -> None:
        """Copy to the same place."""
        self._memory[offset : offset + len(data)] = data

    def finished(self) -> None:
        """Call `done`."""
        self._done()


@dataclass(slots=True)
class _Incoming:
    """A message that is expected."""

    sink: Sink
    received: int = 0


@dataclass(slots=True)
class _Aside:
    """The bytes of a message that is not expected yet."""

    size_bytes: int
    received: int = 0
    parts: list[bytearray] = field(default_factory=list)


@dataclass(slots=True)
class _Outgoing:
    """A message that is being sent."""

    key: Key
    data: memoryview
    sent: Callable[[], None] | None
    at: int = 0


_Queued = tuple[int, int, _Outgoing]  # priority, order of queueing, message


class Connection:
    """Frames to and from one peer; with `keys`, nobody else can make or change one unnoticed."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        view: bytes,
        peer: str,
        keys: Keys | None = None,
        frame_bytes: int = frames.FRAME_BYTES,
        aside_bytes: int = _ASIDE_BYTES,
        silent_s: float = 0.0,
    ) -> None:
        _tune(sock)
        if silent_s:
            _close_if_silent(sock, silent_s)
        self.sock = sock
        self.peer = peer
        self._cut(frame_bytes)
        self.sent_bytes = 0
        self.received_bytes = 0
        self.refused = 0
        self.notices: list[Notice] = []
        self.broken: Corrupt | MismatchedCalls | None = None
        self._view = view
        self._seal_out, self._seal_in = seals_of(keys)
        # Sending.
        self._queue: list[_Queued] = []
        self._order = 0
        self._sequence_out = 0
        self._parts: list[memoryview] = []
        self._current: _Queued | None = None
        # Receiving.
        self._expected: dict[Key, _Incoming] = {}
        self._aside: dict[Key, _Aside] = {}
        self._aside_bytes = 0
        self._most_aside_bytes = aside_bytes
        self._given_up: set[int] = set()
        self._sequence_in = 0
        self._header_bytes = bytearray(HEADER_BYTES)
        self._piece = bytearray(frames.FRAME_BYTES)
        self._header: Header | None = None
        self._target = memoryview(b"")
        self._in_place = False
        self._have = 0
        self._wakes_at = 1
        self._encrypted = isinstance(sock, ssl.SSLSocket)
        self._pending = sock.pending if isinstance(sock, ssl.SSLSocket) else _nothing
        self.progressed = False
        self.interest = select.EPOLLIN

    def fit(self, bytes_per_s: float) -> None:
        """Choose the frame size so that urgent messages wait a few milliseconds at most at this rate."""
        wanted = int(_FRAME_S * bytes_per_s)
        self._cut(min(max(_LEAST_FRAME_BYTES, 1 << max(0, wanted.bit_length() - 1)), frames.FRAME_BYTES))

    def _cut(self, frame_bytes: int) -> None:
        """Keep little unsent data in the kernel: urgent messages cannot overtake it there."""
        self.frame_bytes = frame_bytes
        if self.sock.family in (socket.AF_INET, socket.AF_INET6):
            with contextlib.suppress(OSError):  # not every system has it
                unsent_bytes = max(_LEAST_FRAME_BYTES, frame_bytes // 2)
                self.sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, unsent_bytes)

    def forget(self, operation: int) -> None:
        """Drop all messages of an operation that was given up, also those that arrive later.

        From now on its memory is neither read nor written, so the caller may use it again.
        """
        self._given_up.add(operation)
        self._queue = [entry for entry in self._queue if entry[2].key[0] != operation]
        heapq.heapify(self._queue)
        if self._current is not None and self._current[2].key[0] == operation:
            self._parts = [memoryview(bytes(part)) for part in self._parts]  # a frame is sent whole
            self._current = None
        for key in [key for key in self._expected if key[0] == operation]:
            del self._expected[key]
        for key in [key for key in self._aside if key[0] == operation]:
            self._aside_bytes -= self._aside.pop(key).received
        if self._header is not None and self._header.operation == operation and self._in_place:
            received = self._target[: self._have]
            self._use_piece(self._header.length)
            self._target[: self._have] = received

    # Sending -------------------------------------------------------------------------------------

    def send(self, key: Key, data: memoryview, priority: int, sent: Callable[[], None]) -> None:
        """Queue a message; calls `sent` when the kernel has all of it."""
        self._push(priority, _Outgoing(key, data, sent))

    def tell(self, notice: Notice) -> None:
        """Queue a notice; it overtakes all messages."""
        self._push(_FIRST, _Outgoing((NOTICES, 0), memoryview(notices.encode(notice)), None))

    def _push(self, priority: int, message: _Outgoing) -> None:
        self._order += 1
        heapq.heappush(self._queue, (priority, self._order, message))

    @property
    def wants_to_write(self) -> bool:
        """Whether anything is queued."""
        return bool(self._parts or self._current or self._queue)

    def write(self) -> None:
        """Write what the kernel takes, a few frames at most; `progressed`: whether it took all of them."""
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
            len(message.data),
            message.at,
            len(payload),
            self._seal_out.of(self._sequence_out, PAYLOAD, payload),
        )
        self._sequence_out += 1
        message.at += len(payload)
        self._parts = [memoryview(header.pack(self._seal_out)), payload]
        return True

    def _advance(self, count: int) -> None:
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts.pop(0))
        if self._parts:
            self._parts[0] = self._parts[0][count:]
            return
        if self._current is None:  # the message was dropped meanwhile
            return
        message = self._current[2]
        if message.at >= len(message.data):
            self._current = None
            if message.sent is not None:
                message.sent()

    # Receiving -----------------------------------------------------------------------------------

    @property
    def in_a_frame(self) -> bool:
        """Whether a frame has arrived in part."""
        return self._header is not None

    @property
    def paused(self) -> bool:
        """Whether to stop reading: enough is kept aside, and no expected message can be behind it."""
        return self._aside_bytes > self._most_aside_bytes and not self._expected

    def has(self, key: Key) -> bool:
        """Whether all of a message has arrived before it was expected."""
        aside = self._aside.get(key)
        return aside is not None and aside.received >= aside.size_bytes

    def expect(self, key: Key, sink: Sink) -> None:
        """Set where a message goes; what has arrived of it goes there now.

        If it is wrong, `broken` holds the error: the caller may be serving another peer. After
        MismatchedCalls the connection still works.
        """
        incoming = self._expected[key] = _Incoming(sink)
        aside = self._aside.pop(key, None)
        if aside is None:
            return
        self._aside_bytes -= aside.received
        try:
            if not self._fits(aside.size_bytes, incoming, key):
                return
            for part in aside.parts:
                _hand_over(sink, incoming.received, memoryview(part))
                self._count(key, incoming, len(part))
        except Corrupt as error:
            self.refused += 1
            self.broken = error

    def read(self) -> None:
        """Read what the kernel has. Raises ConnectionError if the peer is gone, Corrupt if it errs."""
        try:
            self._read_frames()
            if self._header is None:  # between two frames, any byte is worth waking for
                self._wake_at(1)
        except (Corrupt, StaleView):
            self.refused += 1
            raise
        except ssl.SSLError as error:
            self.refused += 1
            raise Corrupt(f"TLS with {self.peer} failed: {tls.reason(error)}") from error

    def _read_frames(self) -> None:
        for count in itertools.count():
            if (count >= _FRAMES_AT_ONCE or self.paused) and not self._pending():
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
        header = frames.unpack(
            self._header_bytes,
            seal=self._seal_in,
            view=self._view,
            sequence=self._sequence_in,
            peer=self.peer,
        )
        self._sequence_in += 1
        self._choose_target(header)
        self._header = header
        return True

    def _choose_target(self, header: Header) -> None:
        """Receive the payload into its final place, if that is known."""
        self._use_piece(header.length)
        if header.operation == NOTICES:
            if header.size > _MOST_NOTICE_BYTES or header.length != header.size:
                raise Corrupt(f"{self.peer} sent a notice of {header.size} bytes", where="notices")
            return
        if header.operation in self._given_up:
            return
        key = (header.operation, header.message)
        incoming, aside = self._expected.get(key), self._aside.get(key)
        known = incoming or aside
        if header.offset != (known.received if known else 0):
            raise Corrupt(
                f"{self.peer} sent parts of a message out of order", where=f"message {header.message}"
            )
        if aside is not None and aside.size_bytes != header.size:
            raise Corrupt(f"{self.peer} gave a message two sizes", where=f"message {header.message}")
        if incoming is not None and self._fits(header.size, incoming, key):
            target = incoming.sink.place(header.offset, header.length)
            if target is not None:
                self._target, self._in_place = target, True

    def _use_piece(self, length: int) -> None:
        if length > len(self._piece):
            self._piece = bytearray(length)
        self._target, self._in_place = memoryview(self._piece)[:length], False

    def _fits(self, size_bytes: int, incoming: _Incoming, key: Key) -> bool:
        """Whether a message has the size that is expected.

        One of another call is dropped, with the whole operation, and `broken` says so. Raises Corrupt if
        the size is wrong in any case.
        """
        if incoming.sink.accepts(size_bytes):
            return True
        told = f"{self.peer} sent {size_bytes} bytes where {incoming.sink.size_bytes} were due"
        where = f"message {key[1]} of operation {key[0]:#x}"
        if not incoming.sink.agreed:
            raise Corrupt(told, where=where, fix=SAME_TENSORS)
        self.broken = self.broken or MismatchedCalls(told, where=where, fix=SAME_TENSORS)
        self.forget(key[0])
        return False

    def _read_payload(self) -> bool:
        header, target = self._header, self._target
        assert header is not None
        while self._have < header.length:
            try:
                count = self.sock.recv_into(target[self._have :])
            except BlockingIOError:
                self._wake_at(min(header.length - self._have, _WORTH_WAKING_BYTES))
                return False
            if not count:
                raise ConnectionResetError("the peer closed the connection in the middle of a frame")
            self._have += count
            self.received_bytes += count
        self._have, self._header = 0, None
        frames.check_payload(header, target, seal=self._seal_in, peer=self.peer)
        self._deliver(header, target)
        return True

    def _wake_at(self, count: int) -> None:
        """Ask to be woken when so many bytes are there: a small part of a frame is of no use.

        Not with TLS: the socket object may have read the beginning of a record already.
        """
        if count != self._wakes_at and not self._encrypted:
            self._wakes_at = count
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)

    def _deliver(self, header: Header, data: memoryview) -> None:
        if header.operation == NOTICES:
            self.notices.append(notices.decode(data, peer=self.peer))
            return
        if header.operation in self._given_up:
            return
        key = (header.operation, header.message)
        incoming = self._expected.get(key)
        if incoming is None:
            aside = self._aside.setdefault(key, _Aside(header.size))
            aside.parts.append(bytearray(data))
            aside.received += len(data)
            self._aside_bytes += len(data)
            return
        if not self._in_place:
            if not self._fits(header.size, incoming, key):  # expected only since the header arrived
                return
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


def _nothing() -> int:
    """The bytes in a plain socket object: all of them are in the kernel."""
    return 0


def _close_if_silent(sock: socket.socket, silent_s: float) -> None:
    """The system closes the connection when the other machine has answered nothing for so long.

    A machine without power, or one that is cut off, closes nothing itself. Where a process computes or is
    stopped, its kernel answers; but one that takes none of what is sent for as long counts as silent.
    """
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    asks = 3
    every_s = max(1, round(silent_s / (asks + 1)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, asks)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silent_s))


def _tune(sock: socket.socket) -> None:
    """Settings for bursts of large messages.

    Congestion control is cubic: BBR paces by recent rates and takes a collective's pauses between steps for
    a slow link, which cost a ring of four at 1 Gb/s 5 %.
    """
    sock.setblocking(False)
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
