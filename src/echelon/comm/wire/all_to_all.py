"""Every member sends every other member a message, whose length only the sender knows.

In attempt k (usually there is only attempt 0), a pair of members sends

    3k      head     length of the payload, its checksum, and a checksum of these two
    3k + 1  payload  unless it is empty
    3k + 2  answer   the other way: received, or send again

The sender computes the checksum once, when the operation is created. The receiver asks again for a message
that does not match. A peer that sends the same message damaged three times is disconnected, like a peer
whose frames are damaged.

Invariant: outgoing messages do not change until all answers have arrived. The peers' messages may be used
before that, as soon as all of them have arrived.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import time
from collections.abc import Mapping

import torch
import xxhash
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.wire import frames
from echelon.comm.wire.connection import Connection, Sink, Whole
from echelon.comm.wire.loop import Operation
from echelon.errors import Corrupt, WorkerError

HEAD_BYTES = 20
ATTEMPTS = 3
_NUMBERS = struct.Struct("<QQ")
_CHECK = struct.Struct("<I")
_HEAD, _PAYLOAD, _ANSWER = range(3)
_RECEIVED, _AGAIN = memoryview(b"\1"), memoryview(b"\2")
_MOST_BYTES = 1 << 40
_URGENT = -(1 << 61)  # the priority of answers, which are tiny and let peers free memory
_log = logging.getLogger(__name__)


def pack_head(length_bytes: int, checksum: int) -> bytes:
    """The head of a payload."""
    numbers = _NUMBERS.pack(length_bytes, checksum)
    return numbers + _CHECK.pack(xxhash.xxh32_intdigest(numbers))


def unpack_head(raw: bytes | bytearray) -> tuple[int, int] | None:
    """The length and the checksum of a payload; None if the head is damaged."""
    numbers = bytes(raw[: _NUMBERS.size])
    if _CHECK.unpack_from(raw, _NUMBERS.size) != (xxhash.xxh32_intdigest(numbers),):
        return None
    length_bytes, checksum = _NUMBERS.unpack(numbers)
    return length_bytes, checksum


class _Nowhere(Sink):
    """Drops a message."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def place(self, offset: int, length: int) -> memoryview | None:
        return None

    def take(self, offset: int, data: memoryview) -> None:
        return

    def finished(self) -> None:
        return


class AllToAll(Operation[None]):
    """One worker's part: `outgoing` has a message for each peer, by its rank in the view.

    `received` gives the peers' messages, by rank, as bytes; `future` is done when the peers have this
    worker's messages, too. `sent_bytes` counts the heads and payloads of first attempts, `repeats` the
    further attempts.
    """

    def __init__(
        self, tag: int, outgoing: Mapping[int, memoryview], *, deadline_s: float, priority: int = 0
    ) -> None:
        super().__init__(tag, deadline_s, None)
        self.received: Future[dict[int, Tensor]] = Future(self, self.timing)
        self.repeats = 0
        self.sent_bytes = sum(HEAD_BYTES + len(message) for message in outgoing.values())
        self._outgoing = outgoing
        self._heads = _heads(outgoing)
        self._priority = priority
        self._connections: Mapping[int, Connection] = {}
        self._messages: dict[int, Tensor] = {}
        # Peers whose message or answer is missing; and by peer, the number of answers not yet sent.
        self._missing = set(outgoing)
        self._unanswered = set(outgoing)
        self._answering: dict[int, int] = {}
        self._unread: dict[int, list[int]] = {}  # attempts of unknown length: their heads were damaged

    def finish_sending(self) -> None:
        """Before closing: wait until the peers have this worker's messages, if theirs have arrived."""
        if self.received.done():
            with contextlib.suppress(WorkerError):  # this worker has all it needs
                self.future.wait()

    # In the loop's thread ------------------------------------------------------------------------

    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Send all messages, and expect all heads."""
        self._connections = connections
        self.timing.begun = time.perf_counter()
        for peer in self._outgoing:
            self._send(peer, 0)
        for peer in self._outgoing:
            self._listen(peer, 0)
        self._proceed()

    def needs(self, rank: int) -> bool:
        """Whether its message or answer is missing, or it has not received our answer."""
        return rank in self._missing or rank in self._unanswered or rank in self._answering

    def awaited(self) -> set[int]:
        """Peers whose message is missing; else those whose answer is; else those that receive nothing."""
        return set(self._missing or self._unanswered or self._answering)

    def lacks(self, rank: int) -> bool:
        """Whether its message or answer is missing."""
        return rank in self._missing or rank in self._unanswered

    def end(self, error: BaseException | None = None) -> None:
        """A thread that still waits for messages learns why there will be none."""
        super().end(error)
        self.received.complete(error=error)

    def _proceed(self) -> None:
        if not self._missing and not self.received.done():
            self.timing.ended = time.perf_counter()
            self.received.complete(self._messages)
        if not (self._missing or self._unanswered or self._answering):
            self.end()

    # Sending: attempts, until one is answered as received.

    def _send(self, peer: int, attempt: int) -> None:
        connection, message = self._connections[peer], self._outgoing[peer]
        parts = [(_HEAD, self._heads[peer]), (_PAYLOAD, message)]
        for kind, data in parts if len(message) else parts[:1]:
            connection.send(self._key(attempt, kind), data, self._priority, self._sent)
        answer = bytearray(1)
        sink = Whole(memoryview(answer), lambda: self._answered(peer, attempt, answer), agreed=True)
        connection.expect(self._key(attempt, _ANSWER), sink)

    def _sent(self) -> None:
        self.timing.sent = time.perf_counter()

    def _answered(self, peer: int, attempt: int, answer: bytearray) -> None:
        if answer == _RECEIVED:
            self._unanswered.discard(peer)
            self._proceed()
        elif answer == _AGAIN and attempt + 1 < ATTEMPTS:
            self.repeats += 1
            self._send(peer, attempt + 1)
        else:
            raise self._refusal(peer, "sent an unknown answer")

    # Receiving: attempts, until one matches its head.

    def _listen(self, peer: int, attempt: int) -> None:
        raw = bytearray(HEAD_BYTES)
        sink = Whole(memoryview(raw), lambda: self._headed(peer, attempt, raw), agreed=True)
        self._connections[peer].expect(self._key(attempt, _HEAD), sink)

    def _headed(self, peer: int, attempt: int, raw: bytearray) -> None:
        head = unpack_head(raw)
        if head is None:
            self._unread.setdefault(peer, []).append(attempt)
            self._refuse(peer, attempt)
            return
        length_bytes, checksum = head
        if length_bytes > _MOST_BYTES:
            raise self._refusal(peer, f"announced a message of {length_bytes} bytes")
        connection = self._connections[peer]
        if length_bytes:  # drop the payloads of damaged heads: the connection would keep them aside
            for unread in self._unread.pop(peer, ()):
                connection.expect(self._key(unread, _PAYLOAD), _Nowhere(length_bytes))
        message = self._room(peer, length_bytes)
        memory: memoryview = message.numpy().data

        def arrived() -> None:
            if frames.checksum(memory) == checksum:
                self._accept(peer, attempt, message)
            else:
                self._refuse(peer, attempt)

        if length_bytes:
            connection.expect(self._key(attempt, _PAYLOAD), Whole(memory, arrived))
        else:
            arrived()

    def _accept(self, peer: int, attempt: int, message: Tensor) -> None:
        self._messages[peer] = message
        self._missing.discard(peer)
        self._answer(peer, attempt, _RECEIVED)
        self._proceed()

    def _refuse(self, peer: int, attempt: int) -> None:
        if attempt + 1 == ATTEMPTS:
            raise self._refusal(peer, f"sent a message {ATTEMPTS} times, damaged each time")
        _log.warning("%s sent a damaged message; asking for it again", self._connections[peer].peer)
        self._answer(peer, attempt, _AGAIN)
        self._listen(peer, attempt + 1)

    def _answer(self, peer: int, attempt: int, answer: memoryview) -> None:
        self._answering[peer] = self._answering.get(peer, 0) + 1

        def sent() -> None:
            self._answering[peer] -= 1
            if not self._answering[peer]:
                del self._answering[peer]
            self._proceed()

        self._connections[peer].send(self._key(attempt, _ANSWER), answer, _URGENT, sent)

    def _room(self, peer: int, length_bytes: int) -> Tensor:
        try:
            return torch.empty(length_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError) as error:
            what = f"announced a message of {length_bytes} bytes, and there is no memory for it"
            raise self._refusal(peer, what) from error

    def _refusal(self, peer: int, what: str) -> Corrupt:
        """Raised to the loop, which disconnects the peer and ends all operations that need it."""
        return Corrupt(
            f"{self._connections[peer].peer} {what}",
            ranks=(peer,),
            where=f"all_to_all {self.tag:#x}",
            fix="the memory of that machine, or of this one, may be faulty",
        )

    def _key(self, attempt: int, kind: int) -> tuple[int, int]:
        return self.tag, 3 * attempt + kind


def _heads(outgoing: Mapping[int, memoryview]) -> dict[int, memoryview]:
    """The head of each message; a message to several peers is read once."""
    made: dict[int, memoryview] = {}
    for message in outgoing.values():
        if id(message) not in made:
            made[id(message)] = memoryview(pack_head(len(message), frames.checksum(message)))
    return {peer: made[id(message)] for peer, message in outgoing.items()}
