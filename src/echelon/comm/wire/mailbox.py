"""Messages between two members of a view, at any time, in the order in which they were sent.

Collectives are operations that all members begin together. A parameter server is talked to by whoever
happens to be ready: each pair of members has a stream of messages each way, over the connection that they
have anyway, with its frames, checksums and deadlines of death. A message is a head of fixed size and, if it
says so, a payload, which goes straight to where `place` wants it.

All methods but `send`, `receive` and `leave` run in the loop's thread.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from echelon.comm.wire.connection import Connection, Whole
from echelon.comm.wire.loop import CHANNEL_BITS, Loop, Operation

POST_CHANNEL = 1 << 20  # beyond any that groups open
_HEAD = struct.Struct("<HHHHqqQ")
_EVER_S = 1e9
_LOOK_S = 0.05


class MessageHead(NamedTuple):
    """The header of a message. The sender and the receiver define what the fields mean."""

    kind: int
    table: int = 0
    shard: int = 0
    flags: int = 0
    step: int = 0
    start: int = 0


class Message(NamedTuple):
    """A message that has arrived; the payload is empty if it went to where `place` said."""

    peer: int
    head: MessageHead
    payload: memoryview


Place = Callable[[int, MessageHead, int], memoryview | None]  # peer, head, bytes of payload
_NOTHING = memoryview(b"")


class Mailbox(Operation[None]):
    """A member's messages to and from others; one for each member of a view.

    A peer that leaves in peace while its messages are still wanted (`wanted` says whose) ends the post, as
    does one that dies. They are wanted until it sends a message of the kind `farewell`.
    """

    def __init__(
        self,
        loop: Loop,
        peers: set[int],
        *,
        place: Place = lambda peer, head, length: None,
        farewell: int = -1,
    ) -> None:
        super().__init__(POST_CHANNEL << CHANNEL_BITS | 1, _EVER_S, None)
        self.wanted = set(peers)
        self._loop = loop
        self._peers = set(peers)
        self._place = place
        self._farewell = farewell
        self._outbox: deque[tuple[int, MessageHead, memoryview, Callable[[], None]]] = deque()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._connections: Mapping[int, Connection] = {}
        self._out = dict.fromkeys(peers, -1)
        self._in = dict.fromkeys(peers, -1)
        loop.submit(self)

    def send(
        self,
        peer: int,
        head: MessageHead,
        payload: memoryview = _NOTHING,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queue a message. Do not change the payload before `sent` is called or the message is answered."""
        self._outbox.append((peer, head, payload, sent or _nothing))
        self._loop.submit(self)

    def receive(self, timeout_s: float) -> Message | None:
        """The next message of anybody; None if there is none in time. Raises what ended the post."""
        try:
            message = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            message = None
        if message is None and self.error is not None:
            raise self.error
        return message

    def leave(self, peers: Iterable[int], head: MessageHead, timeout_s: float) -> None:
        """Send a last message to these peers, who may go from now on; returns when it is on its way.

        A loop that is closed drops what it still has to send, and a farewell must not be among it.
        """
        gone = threading.Semaphore(0)
        told = list(peers)
        for peer in told:
            self.wanted.discard(peer)
            self.send(peer, head, sent=gone.release)
        until = time.monotonic() + timeout_s
        for _ in told:
            while self.error is None and time.monotonic() < until and not gone.acquire(timeout=_LOOK_S):
                pass

    # In the loop's thread ------------------------------------------------------------------------

    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Listen, the first time; send what is in the outbox, every time."""
        if not self._connections:
            self._connections = connections
            for peer in self._peers:
                self._listen(peer)
        while self._outbox:
            peer, head, payload, sent = self._outbox.popleft()
            packed = memoryview(_HEAD.pack(*head, len(payload)))
            self._send(peer, packed, sent if not len(payload) else _nothing)
            if len(payload):
                self._send(peer, payload, sent)

    def needs(self, rank: int) -> bool:
        """Whether messages of that peer are still wanted."""
        return rank in self.wanted

    def awaited(self) -> set[int]:
        """Nobody in particular: a post never ends by itself."""
        return set()

    def end(self, error: BaseException | None = None) -> None:
        """Wake whoever waits."""
        super().end(error)
        self._inbox.put(None)

    def _send(self, peer: int, data: memoryview, sent: Callable[[], None]) -> None:
        self._out[peer] += 1
        self._connections[peer].send((self.tag, self._out[peer]), data, 0, sent)

    def _listen(self, peer: int) -> None:
        raw = bytearray(_HEAD.size)
        self._expect(peer, memoryview(raw), lambda: self._headed(peer, raw))

    def _headed(self, peer: int, raw: bytearray) -> None:
        *fields, length = _HEAD.unpack(raw)
        head = MessageHead(*fields)
        if head.kind == self._farewell:  # noted here, for the connection may end right behind it
            self.wanted.discard(peer)
        if not length:
            self._inbox.put(Message(peer, head, _NOTHING))
            self._listen(peer)
            return
        placed = self._place(peer, head, length)
        memory = memoryview(bytearray(length)) if placed is None else placed
        payload = memory if placed is None else _NOTHING

        def arrived() -> None:
            self._inbox.put(Message(peer, head, payload))
            self._listen(peer)

        self._expect(peer, memory, arrived)

    def _expect(self, peer: int, memory: memoryview, done: Callable[[], None]) -> None:
        self._in[peer] += 1
        self._connections[peer].expect((self.tag, self._in[peer]), Whole(memory, done))


def _nothing() -> None:
    return
