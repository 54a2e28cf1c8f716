"""Messages between all members of a group, of which only their writers know how long they are.

Each member gives every other one a message. In attempt k, and mostly there is only attempt 0, a pair sends

    3k      head     length of the payload, its checksum, and a checksum of these two
    3k + 1  payload  unless it is empty
    3k + 2  answer   the other way: well, or again

The checksum is of what the writer meant to send, taken when the swap is made and never again. What does not
fit it is refused and asked for again; who sends the same message damaged three times is given up as one
whose frames are damaged is: the connection with it ends.

Invariant: what is sent stays as it is until the swap has *ended*, which is when all answers are here. The
messages of the others may be used before, as soon as all of them are here: answers cost no time.
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
_WELL, _AGAIN = memoryview(b"\1"), memoryview(b"\2")
_MOST_BYTES = 1 << 40
_URGENT = -(1 << 61)  # the priority of answers: tiny, and memory is held until they are there
_log = logging.getLogger(__name__)


def pack_head(length_bytes: int, checksum: int) -> bytes:
    """What is said before a payload."""
    numbers = _NUMBERS.pack(length_bytes, checksum)
    return numbers + _CHECK.pack(xxhash.xxh32_intdigest(numbers))


def unpack_head(raw: bytes | bytearray) -> tuple[int, int] | None:
    """The length and the checksum of a payload; None if the head is damaged itself."""
    numbers = bytes(raw[: _NUMBERS.size])
    if _CHECK.unpack_from(raw, _NUMBERS.size) != (xxhash.xxh32_intdigest(numbers),):
        return None
    length_bytes, checksum = _NUMBERS.unpack(numbers)
    return length_bytes, checksum


class _Nowhere(Sink):
    """Passes over a message that nobody can use."""

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
        # By peer: who has not sent all of its message, who has not answered, and answers not yet sent.
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
        """Send all, and listen to all."""
        self._connections = connections
        self.timing.begun = time.perf_counter()
        for peer in self._outgoing:
            self._send(peer, 0)
        for peer in self._outgoing:
            self._listen(peer, 0)
        self._proceed()

    def needs(self, rank: int) -> bool:
        """Whether its message or its answer is not here, or it has not got ours."""
        return rank in self._missing or rank in self._unanswered or rank in self._answering

    def awaited(self) -> set[int]:
        """Those whose messages are not here; else those who do not answer; else those who do not listen."""
        return set(self._missing or self._unanswered or self._answering)

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

    # What goes out: attempts, until one is answered well.

    def _send(self, peer: int, attempt: int) -> None:
        connection, message = self._connections[peer], self._outgoing[peer]
        parts = [(_HEAD, self._heads[peer]), (_PAYLOAD, message)]
        for kind, data in parts if len(message) else parts[:1]:
            connection.send(self._key(attempt, kind), data, self._priority, self._sent)
        answer = bytearray(1)
        sink = Whole(memoryview(answer), lambda: self._answered(peer, attempt, answer))
        connection.expect(self._key(attempt, _ANSWER), sink)

    def _sent(self) -> None:
        self.timing.sent = time.perf_counter()

    def _answered(self, peer: int, attempt: int, answer: bytearray) -> None:
        if answer == _WELL:
            self._unanswered.discard(peer)
            self._proceed()
        elif answer == _AGAIN and attempt + 1 < ATTEMPTS:
            self.repeats += 1
            self._send(peer, attempt + 1)
        else:
            raise self._refusal(peer, "gave an answer that is none")

    # What comes in: attempts, until one fits its head.

    def _listen(self, peer: int, attempt: int) -> None:
        raw = bytearray(HEAD_BYTES)
        sink = Whole(memoryview(raw), lambda: self._headed(peer, attempt, raw))
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
        if length_bytes:  # what is never taken would stay with the connection
            for unread in self._unread.pop(peer, ()):
                connection.expect(self._key(unread, _PAYLOAD), _Nowhere(length_bytes))
        message = self._room(peer, length_bytes)
        memory: memoryview = message.numpy().data

        def came() -> None:
            if frames.checksum(memory) == checksum:
                self._take(peer, attempt, message)
            else:
                self._refuse(peer, attempt)

        if length_bytes:
            connection.expect(self._key(attempt, _PAYLOAD), Whole(memory, came))
        else:
            came()

    def _take(self, peer: int, attempt: int, message: Tensor) -> None:
        self._messages[peer] = message
        self._missing.discard(peer)
        self._answer(peer, attempt, _WELL)
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
            what = f"announced a message of {length_bytes} bytes, for which there is no memory"
            raise self._refusal(peer, what) from error

    def _refusal(self, peer: int, what: str) -> Corrupt:
        """Raised to the connection, which ends: with it everything that needs this peer, on both sides."""
        return Corrupt(
            f"{self._connections[peer].peer} {what}",
            ranks=(peer,),
            where=f"swap {self.tag:#x}",
            fix="the memory of that machine, or of this one, may be faulty",
        )

    def _key(self, attempt: int, kind: int) -> tuple[int, int]:
        return self.tag, 3 * attempt + kind


def _heads(outgoing: Mapping[int, memoryview]) -> dict[int, memoryview]:
    """A message that goes to several is read once."""
    made: dict[int, memoryview] = {}
    for message in outgoing.values():
        if id(message) not in made:
            made[id(message)] = memoryview(pack_head(len(message), frames.checksum(message)))
    return {peer: made[id(message)] for peer, message in outgoing.items()}
