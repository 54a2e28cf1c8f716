"""Messages between two members of a view, at any time, in the order in which they were sent.

All members begin a collective together. A parameter server gets messages from whichever worker is ready.
Each pair of members has a stream of messages each way, over the connection that they already have, with its
frames and checksums.

On the wire a message is

    payload length    8 bytes
    header            a msgspec Struct in MessagePack; its length is that of the wire message
    payload           raw bytes, a wire message of its own; absent if the length is 0

The receiver decodes the header strictly, as one of the classes in `accepts`, and then asks `place` where
the payload goes. So a payload is received straight into its destination, without a copy. A header that does
not decode ends the mailbox with an error that names the sender.

All methods but `send`, `receive` and `leave` run in the loop's thread.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from echelon.comm.inbox import Inbox
from echelon.comm.wire.connection import Connection, Sink, Whole
from echelon.comm.wire.loop import CHANNEL_BITS, Loop, Operation
from echelon.errors import Corrupt

MAILBOX_CHANNEL = 1 << 20  # beyond any channel that groups open
MOST_HEADER_BYTES = 64 << 20  # a table of a million parameters needs about 10 MB
_LENGTH = struct.Struct("<Q")
_NO_DEADLINE_S = 1e9
_POLL_S = 0.05
_NOTHING = memoryview(b"")
_FIX = "all workers and servers must run the same version of Echelon"

M = TypeVar("M")
PlacePayload = Callable[[int, M, int], memoryview | None]  # peer, header, bytes of payload


class Delivery(NamedTuple, Generic[M]):
    """A message that has arrived; the payload is empty if it went to where `place` said."""

    peer: int
    message: M
    payload: memoryview


class Mailbox(Operation[None], Generic[M]):
    """One member's messages to and from others.

    `accepts` is the class, or the tagged union of classes, that headers are decoded as. `place` gets the
    sender, the header and the payload's length, and returns the payload's memory, None for new memory, or
    raises Corrupt.

    A peer that leaves while its messages are still wanted (`wanted`) ends the mailbox, as does one that
    dies. They are wanted until the peer sends a message of class `farewell`.
    """

    def __init__(
        self,
        loop: Loop,
        peers: set[int],
        accepts: Any,
        *,
        place: PlacePayload[M] = lambda peer, message, length: None,
        farewell: type[msgspec.Struct] | None = None,
    ) -> None:
        super().__init__(MAILBOX_CHANNEL << CHANNEL_BITS | 1, _NO_DEADLINE_S, None)
        self.wanted = set(peers)
        self._loop = loop
        self._peers = set(peers)
        self._place = place
        self._farewell = farewell
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(accepts)
        self._outbox: deque[tuple[int, memoryview, memoryview, Callable[[], None]]] = deque()
        self._inbox: Inbox[Delivery[M] | None] = Inbox()
        self._connections: Mapping[int, Connection] = {}
        self._out = dict.fromkeys(peers, -1)
        self._in = dict.fromkeys(peers, -1)
        self.notify: Callable[[], None] = _nothing  # the loop's thread calls it when there is news
        loop.submit(self)

    def send(
        self,
        peer: int,
        message: msgspec.Struct,
        payload: memoryview = _NOTHING,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message. Do not change the payload before `sent` is called or the message is answered."""
        header = bytearray(_LENGTH.pack(len(payload)))
        self._encoder.encode_into(message, header, _LENGTH.size)
        self._outbox.append((peer, memoryview(header), payload, sent or _nothing))
        self._loop.submit(self)

    def receive(self, timeout_s: float) -> Delivery[M] | None:
        """The next message from any peer; None if none comes in time. Raises what ended the mailbox."""
        try:
            delivery = self._inbox.get_within(timeout_s)
        except queue.Empty:
            delivery = None
        if delivery is None and self.error is not None:
            raise self.error
        return delivery

    @property
    def is_empty(self) -> bool:
        """Whether no message waits to be received."""
        return self._inbox.empty()

    def leave(self, peers: Iterable[int], message: msgspec.Struct, timeout_s: float) -> None:
        """Send a last message to these peers, which may leave from now on; wait until the kernel has it.

        A loop that closes drops its unsent messages, and the last message must not be among them.
        """
        sent = threading.Semaphore(0)
        last = list(peers)
        for peer in last:
            self.wanted.discard(peer)
            self.send(peer, message, sent=sent.release)
        until = time.monotonic() + timeout_s
        for _ in last:
            while self.error is None and time.monotonic() < until and not sent.acquire(timeout=_POLL_S):
                pass

    # In the loop's thread ------------------------------------------------------------------------

    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Listen, the first time; send the queued messages, every time."""
        if not self._connections:
            self._connections = connections
            for peer in self._peers:
                self._listen(peer)
        while self._outbox:
            peer, header, payload, sent = self._outbox.popleft()
            self._send(peer, header, sent if not len(payload) else _nothing)
            if len(payload):
                self._send(peer, payload, sent)

    def needs(self, rank: int) -> bool:
        """Whether messages from that peer are still wanted."""
        return rank in self.wanted

    def awaited(self) -> set[int]:
        """Nobody in particular: a mailbox has no end of its own."""
        return set()

    def end(self, error: BaseException | None = None) -> None:
        """Close the mailbox and wake the threads that wait in `receive`."""
        super().end(error)
        self._deliver(None)

    def _deliver(self, delivery: Delivery[M] | None) -> None:
        self._inbox.put(delivery)
        self.notify()

    def _send(self, peer: int, data: memoryview, sent: Callable[[], None]) -> None:
        self._out[peer] += 1
        self._connections[peer].send((self.tag, self._out[peer]), data, 0, sent)

    def _listen(self, peer: int) -> None:
        self._expect(peer, _HeaderSink(lambda header: self._read_header(peer, header)))

    def _read_header(self, peer: int, data: memoryview) -> None:
        (length,) = _LENGTH.unpack_from(data)
        message = self._decoded(peer, data[_LENGTH.size :])
        if self._farewell is not None and isinstance(message, self._farewell):
            self.wanted.discard(peer)  # here, not in `receive`: the connection may end right after it
        if not length:
            self._deliver(Delivery(peer, message, _NOTHING))
            self._listen(peer)
            return
        placed = self._place(peer, message, length)
        memory = self._allocated(peer, length) if placed is None else placed
        payload = memory if placed is None else _NOTHING

        def arrived() -> None:
            self._deliver(Delivery(peer, message, payload))
            self._listen(peer)

        self._expect(peer, Whole(memory, arrived))

    def _decoded(self, peer: int, header: memoryview) -> M:
        try:
            return self._decoder.decode(header)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self._corrupt(peer, f"a message that cannot be decoded: {error}") from error

    def _allocated(self, peer: int, length: int) -> memoryview:
        try:
            return memoryview(bytearray(length))
        except (MemoryError, OverflowError) as error:
            raise self._corrupt(peer, f"a message of {length} bytes, more than fit in memory") from error

    def _corrupt(self, peer: int, what: str) -> Corrupt:
        return Corrupt(
            f"{self._connections[peer].peer} sent {what}", ranks=(peer,), where="mailbox", fix=_FIX
        )

    def _expect(self, peer: int, sink: Sink) -> None:
        self._in[peer] += 1
        self._connections[peer].expect((self.tag, self._in[peer]), sink)


class _HeaderSink(Sink):
    """Takes a header, whose length is known when its first frame arrives."""

    def __init__(self, done: Callable[[memoryview], None]) -> None:
        self.size_bytes = -1  # not known yet
        self._memory = _NOTHING
        self._done = done

    def accepts(self, size_bytes: int) -> bool:
        """Any length within the limit; all frames of the header must agree on it."""
        if self.size_bytes < 0 and _LENGTH.size < size_bytes <= MOST_HEADER_BYTES:
            self.size_bytes = size_bytes
            self._memory = memoryview(bytearray(size_bytes))
        return size_bytes == self.size_bytes

    def place(self, offset: int, length: int) -> memoryview | None:
        """The header's own memory."""
        return self._memory[offset : offset + length]

    def take(self, offset: int, data: memoryview) -> None:
        """Copy bytes that arrived before anybody listened."""
        self._memory[offset : offset + len(data)] = data

    def finished(self) -> None:
        """Hand over the whole header."""
        self._done(self._memory)


def _nothing() -> None:
    return
