"""Messages between workers and servers: through shared memory on one machine, over TCP otherwise.

Every process that opens memory has a segment with a bell, on which it sleeps, and one ring for each sender
(ring.py). The thread that sends writes to the receiver's ring and wakes the thread that receives; no other
thread takes part. A message that is too long for the ring goes over TCP, after a mark in the ring, so
messages of one sender arrive in the order in which they were sent.

TCP also tells that a peer is gone: the loop's thread rings this process's own bell then.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic

import msgspec
import torch
from torch import Tensor

from echelon.comm.memory.bell import Bells
from echelon.comm.memory.segment import Handle, handle_of, make, map_segment, no_room
from echelon.comm.wire.mailbox import Delivery, M, Mailbox, PlacePayload
from echelon.errors import Corrupt, LaunchError, RoundTimeout
from echelon.server.protocol import SharedMemory
from echelon.server.ring import MOST_BYTES, RING_BYTES, MessageRing

_PAGE_BYTES = 4096  # before the rings: the secret, and the bells
_BELLS = 64
_RECEIVER, _SENDER = 0, 1  # positions of bells
_LONGEST_SLEEP_S = 0.05  # a ring may be missed on some processors
_FULL_S = 1e-3
_NOTHING = memoryview(b"")
_log = logging.getLogger(__name__)


class OwnSegment:
    """A segment that this process has made and others may map; `close` once they have."""

    def __init__(self, size_bytes: int) -> None:
        try:
            self._fd = make(size_bytes)
        except OSError as error:
            raise no_room(size_bytes, error) from error
        try:
            handle = handle_of(self._fd)
            self.memory = map_segment(os.getpid(), handle, size_bytes)
        except (OSError, RuntimeError) as error:
            self.close()
            raise no_room(size_bytes, error) from error
        secret = secrets.randbits(62)
        self.memory[:8].view(torch.int64)[0] = secret
        self.shared = SharedMemory(pid=os.getpid(), handle=handle, size_bytes=size_bytes, secret=secret)

    def close(self) -> None:
        """Let nobody else map it. It lives as long as it is mapped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def map_shared(shared: SharedMemory) -> Tensor:
    """Map another process's segment, as bytes. Raises LaunchError if it is not to be had from here."""
    try:
        memory = map_segment(shared.pid, Handle(*shared.handle), shared.size_bytes)
    except (OSError, RuntimeError) as error:
        raise no_room(shared.size_bytes, error) from error
    if int(memory[:8].view(torch.int64)[0]) != shared.secret:
        raise LaunchError(f"process {shared.pid} is a different process here", where="shared memory")
    return memory


class _PeerRing:
    """The ring to one peer, and the peer's bell."""

    def __init__(self, segment: Tensor, place: int) -> None:
        self.ring = MessageRing(_ring_memory(segment, place))
        self._bells = Bells(_SENDER, 2, _bell_memory(segment))

    def wake(self) -> None:
        self._bells.ring_one(_RECEIVER)


class MemoryMailbox(Generic[M]):
    """As `Mailbox`, which it uses for peers on other machines; `peers` may send through memory.

    `deadline_s`: how long to wait for room in a peer's ring.
    """

    def __init__(
        self,
        mailbox: Mailbox[M],
        accepts: Any,
        *,
        place: PlacePayload[M],
        peers: Sequence[int],
        deadline_s: float,
    ) -> None:
        self._mailbox = mailbox
        self._place = place
        self._deadline_s = deadline_s
        self._peers = list(peers)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(accepts)
        self._own: OwnSegment | None = None
        self._bells: Bells | None = None
        self._in: list[tuple[int, MessageRing]] = []
        self._ring_of: dict[int, MessageRing] = {}
        self._out: dict[int, _PeerRing] = {}
        self._sending = threading.Lock()
        self._owed: set[int] = set()  # peers whose next message comes over TCP
        self._early: dict[int, deque[Delivery[M]]] = {}  # TCP messages that no mark was read for yet
        self._turn = 0

    @property
    def error(self) -> BaseException | None:
        """What ended the mailbox, if anything did."""
        return self._mailbox.error

    # Opening -------------------------------------------------------------------------------------

    def open_memory(self) -> SharedMemory:
        """Make this process's segment, if there is none yet; peers map it and write to it."""
        if self._own is None:
            own = OwnSegment(_PAGE_BYTES + RING_BYTES * len(self._peers))
            self._in = [
                (peer, MessageRing(_ring_memory(own.memory, place)))
                for place, peer in enumerate(self._peers)
            ]
            self._ring_of = dict(self._in)
            self._bells = Bells(_RECEIVER, 2, _bell_memory(own.memory))
            self._own = own
            # The loop's thread rings as a peer would.
            bells = Bells(_SENDER, 2, _bell_memory(own.memory))
            self._mailbox.notify = lambda: bells.ring_one(_RECEIVER)
        return self._own.shared

    def use_memory(self, peer: int, shared: SharedMemory, place: int) -> None:
        """From now on write to a peer's segment, whose ring number `place` is for this process."""
        self._out[peer] = _PeerRing(map_shared(shared), place)

    def close(self) -> None:
        """Let nobody else map this process's segment; messages still come through it."""
        if self._own is not None:
            self._own.close()

    # Sending -------------------------------------------------------------------------------------

    def send(
        self,
        peer: int,
        message: msgspec.Struct,
        payload: memoryview = _NOTHING,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Send or queue a message. Do not change the payload before `sent` or the message's answer."""
        out = self._out.get(peer)
        if out is None:
            self._mailbox.send(peer, message, payload, sent)
            return
        header = self._encoder.encode(message)
        fits = len(header) + len(payload) <= MOST_BYTES
        with self._sending:
            if fits and out.ring.put(header, payload):
                out.wake()
            else:
                self._mark(peer, out)
                self._mailbox.send(peer, message, payload, sent)
                return
        if sent is not None:
            sent()

    def _mark(self, peer: int, out: _PeerRing) -> None:
        until = time.monotonic() + self._deadline_s
        while not out.ring.mark():
            out.wake()
            if self._mailbox.error is not None:
                return
            if time.monotonic() > until:
                raise RoundTimeout(
                    f"rank {peer} has read no messages for {self._deadline_s:g} s",
                    ranks=(peer,),
                    where="parameter server",
                    fix="see that process's log, or raise --round-timeout-s",
                )
            time.sleep(_FULL_S)
        out.wake()

    def leave(self, peers: Iterable[int], message: msgspec.Struct, timeout_s: float) -> None:
        """As `Mailbox.leave`, over TCP, where the loop's thread sees that the peer may go."""
        last = list(peers)
        with self._sending:
            for peer in last:
                if peer in self._out:
                    self._mark(peer, self._out[peer])
        self._mailbox.leave(last, message, timeout_s)

    # Receiving -----------------------------------------------------------------------------------

    def receive(self, timeout_s: float) -> Delivery[M] | None:
        """The next message from any peer; None if none comes in time. Raises what ended the mailbox."""
        if self._bells is None:
            return self._mailbox.receive(timeout_s)
        until = time.perf_counter() + timeout_s
        while True:
            found = self._next()
            if found is not None:
                return found
            left_s = until - time.perf_counter()
            if left_s <= 0:
                return None
            self._bells.sleep(min(left_s, _LONGEST_SLEEP_S), self._has_nothing)

    def _has_nothing(self) -> bool:
        return self._mailbox.is_empty and not any(
            ring.has_entries for peer, ring in self._in if peer not in self._owed
        )

    def _next(self) -> Delivery[M] | None:
        """The next message that is here, from the peers in turn."""
        for step in range(len(self._in)):
            place = (self._turn + step) % len(self._in)
            found = self._from_ring(*self._in[place])
            if found is not None:
                self._turn = place + 1
                return found
        while not self._mailbox.is_empty or self._mailbox.error is not None:
            delivery = self._mailbox.receive(0.0)
            if delivery is None:
                return None
            ring = self._ring_of.get(delivery.peer)
            if delivery.peer in self._owed or ring is None or not ring.is_used:
                self._owed.discard(delivery.peer)
                return delivery
            self._early.setdefault(delivery.peer, deque()).append(delivery)
            found = self._from_ring(delivery.peer, ring)
            if found is not None:
                return found
        return None

    def _from_ring(self, peer: int, ring: MessageRing) -> Delivery[M] | None:
        if peer in self._owed:
            return None
        entry = ring.take()
        if entry is None:
            return None
        header, payload = entry
        if not header:
            if self._early.get(peer):
                return self._early[peer].popleft()
            self._owed.add(peer)
            return None
        return self._delivered(peer, header, payload)

    def _delivered(self, peer: int, header: bytes, payload: bytes) -> Delivery[M]:
        try:
            message = self._decoder.decode(header)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Corrupt(
                f"rank {peer} sent a message that cannot be decoded: {error}",
                ranks=(peer,),
                where="mailbox",
                fix="all workers and servers must run the same version of Echelon",
            ) from error
        if not payload:
            return Delivery(peer, message, _NOTHING)
        placed = self._place(peer, message, len(payload))
        if placed is None:
            return Delivery(peer, message, memoryview(bytearray(payload)))
        placed[:] = payload
        return Delivery(peer, message, _NOTHING)


def _bell_memory(segment: Tensor) -> Tensor:
    return segment[_BELLS : _BELLS + Bells.size_bytes(2)]


def _ring_memory(segment: Tensor, place: int) -> Tensor:
    return segment[_PAGE_BYTES + RING_BYTES * place : _PAGE_BYTES + RING_BYTES * (place + 1)]
