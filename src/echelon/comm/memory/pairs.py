"""Messages from one worker to another of its machine, through rings in shared memory.

Every ordered pair of workers has a ring of entries. The sender writes an entry and publishes `sent`; the
receiver takes it out and publishes `taken`. A short message is in its entry. A longer one is in a block
(`blocks.py`): its entry says which, and the receiver copies while the sender still fills it. So a message
is on its way as soon as it is sent, and the sender need not wait. Only if a ring is full, or the blocks
are, the rest of it leaves later: while this worker waits for something or makes its next call.

Messages between two workers with the same key are received in the order in which they were sent.
"""

from __future__ import annotations

import logging
import platform
import struct
import threading
from collections import deque
from collections.abc import Sequence
from ctypes import memmove, string_at
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.comm.memory.bell import Bells
from echelon.comm.memory.blocks import MOST_READERS, Block, BlockPool, MappedBlocks
from echelon.comm.memory.segment import Handle
from echelon.errors import LaunchError

Key = tuple[int, int]  # a channel and a tag on it
_RING = 8  # entries
_HEAD_BYTES = 64
_HEAD = struct.Struct("=8q")  # channel, tag, length, that of the piece; block, or -1, and its length
_SHORT_HEAD = struct.Struct("=5q")  # the same without a block
_LINE = 8  # int64 numbers per cache line
_MOST_INLINE_BYTES = 64 * 1024
_LEAST_INLINE_BYTES = 256
_ALL_RINGS_BYTES = 2 * 1024 * 1024  # if workers are few
_CHUNK_BYTES = 128 * 1024  # after so many bytes the receiver may go on
_SENT, _TAKEN = 0, 1
_IN_ORDER = platform.machine() in ("x86_64", "AMD64")  # others see writes in their order
_log = logging.getLogger(__name__)


class Outgoing:
    """A message to one or several workers; its memory does not change until it is `done`."""

    def __init__(self, tensor: Tensor, key: Key, to: Sequence[int]) -> None:
        self.tensor = tensor
        self.key = key
        self.to = tuple(to)
        self.address = tensor.data_ptr()
        self.length = tensor.numel() * tensor.element_size()
        self.pieces: list[tuple[Block, int, int]] = []  # the block, where the piece begins, its length
        self.next = dict.fromkeys(to, 0)  # by receiver: its next piece
        self.left = set(to)  # receivers that have not been told of all pieces
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the sender may change its tensor."""
        return not self.left or self.error is not None

    @property
    def staged_bytes(self) -> int:
        """How many bytes are in blocks."""
        return sum(length for _, _, length in self.pieces)


@dataclass(slots=True)
class _Arrival:
    """A message that has arrived at least in part: its pieces as bytes, or in blocks with their use."""

    length: int
    told: int = 0  # bytes in the pieces so far
    pieces: deque[tuple[bytes | Block, int, int]] = field(default_factory=deque)  # with use and length


class Incoming:
    """What this worker wants to receive; `into` is None if memory is to be made for it, as bytes."""

    __slots__ = (
        "copied", "done", "key", "length", "of_piece", "route", "sent_length", "source", "tensor",
    )  # fmt: skip

    def __init__(self, source: int, key: Key, into: Tensor | None) -> None:
        self.source = source
        self.key = key
        self.route = source, key
        self.tensor = into
        self.length = -1 if into is None else into.numel() * into.element_size()
        self.sent_length = -1  # of the message, once it is known
        self.copied = 0
        self.of_piece = 0
        self.done = False

    @property
    def fits(self) -> bool:
        """Whether the message has the length that was asked for."""
        return self.length in (-1, self.sent_length)


class PairRings:
    """The rings between the workers of one machine; `rank` is a position among them."""

    def __init__(self, rank: int, pids: Sequence[int], memory: Tensor) -> None:
        self.rank = rank
        self.size = len(pids)
        parts = torch.split(memory, _parts(self.size))
        self._memory = memory
        self._numbers = parts[0].view(torch.int64).numpy().data
        self.bells = Bells(rank, self.size, parts[1])
        self._rings = parts[2]
        self._raw = parts[2].numpy().data
        self._inline = _inline_bytes(self.size)
        self._entry_bytes = _HEAD_BYTES + self._inline
        self._pool = BlockPool()
        self._mapped = MappedBlocks(pids)
        self._sent = [0] * self.size
        self._taken = [0] * self.size
        self._outgoing: list[deque[Outgoing]] = [deque() for _ in range(self.size)]
        self._partial: list[_Arrival | None] = [None] * self.size
        self._arrived: dict[tuple[int, Key], deque[_Arrival]] = {}
        self._wanted: dict[tuple[int, Key], deque[Incoming]] = {}
        everybody = range(self.size)
        self._sent_at = [self._place(_SENT, rank, to) for to in everybody]  # this worker's numbers
        self._taken_at = [self._place(_TAKEN, source, rank) for source in everybody]
        self._sent_to_me_at = [self._place(_SENT, source, rank) for source in everybody]  # the others'
        self._taken_from_me_at = [self._place(_TAKEN, rank, to) for to in everybody]
        self._base = parts[2].data_ptr()
        self._received = 0
        self._lock = threading.Lock()
        self._fence = threading.Lock()

    @staticmethod
    def size_bytes(size: int) -> int:
        """The memory for the rings of so many workers."""
        return sum(_parts(size))

    @staticmethod
    def fits(size: int) -> bool:
        """Whether there can be rings for so many workers."""
        return size <= min(MOST_READERS, 64)

    # What others call ----------------------------------------------------------------------------

    def send(self, message: Outgoing) -> None:
        """Send it, as far as there is room."""
        with self._lock:
            for to in message.to:
                self._outgoing[to].append(message)
            for to in message.to:
                self._push(to)

    def send_now(self, address: int, length: int, key: Key, to: int) -> bool:
        """Send a short message at once; returns False if it is too long, or there is no room yet."""
        if length > self._inline:
            return False
        with self._lock:
            number = self._sent[to]
            if self._outgoing[to] or number - self._numbers[self._taken_from_me_at[to]] >= _RING:
                return False
            at = self._entry_at(self.rank, to, number)
            if length:
                memmove(self._base + at + _HEAD_BYTES, address, length)
            _SHORT_HEAD.pack_into(self._raw, at, *key, length, length, -1)
            self._sent[to] = number + 1
            self._publish(self._sent_at[to], number + 1)
        self.bells.ring_one(to)
        return True

    def want(self, incoming: Incoming) -> None:
        """Receive a message into its memory, after those wanted before with the same key."""
        with self._lock:
            route = incoming.route
            self._wanted.setdefault(route, deque()).append(incoming)
            self._drain(incoming.source)
            if route in self._arrived:
                self._match(route)

    def receive(self, incoming: Incoming) -> bool:
        """Go on with it without waiting; returns whether it is there."""
        if incoming.done:
            return True
        source = incoming.source
        fresh = self._numbers[self._sent_to_me_at[source]] != self._taken[source]
        if (fresh or incoming.route in self._arrived) and self._lock.acquire(False):
            try:
                self._drain(source)
                if incoming.route in self._arrived:
                    self._match(incoming.route)
            finally:
                self._lock.release()
        return incoming.done

    def advance(self) -> bool:
        """Go on with everything without waiting; returns whether something is left."""
        sending = any(self._outgoing)
        if not sending and not self._wanted:
            return False
        if self._lock.acquire(blocking=False):
            before = self._received
            try:
                self._push_all()
                for key in list(self._wanted):
                    self._drain(key[0])
                    self._match(key)
            finally:
                self._lock.release()
            if self._received != before:
                self.bells.ring_own()  # another thread may sleep until its message is there
        return True

    def take_all(self) -> None:
        """Take all entries out of the rings to this worker; their senders may leave then."""
        if self._lock.acquire(blocking=False):
            try:
                for source in range(self.size):
                    self._drain(source)
                self._push_all()
            finally:
                self._lock.release()

    def unread(self, to: int) -> bool:
        """Whether that worker has not yet taken all that was sent to it."""
        return bool(self._outgoing[to]) or self._numbers[self._taken_from_me_at[to]] < self._sent[to]

    def close(self) -> None:
        """Forget all blocks; what others have mapped stays theirs."""
        with self._lock:
            self._pool.close()

    # Sending -------------------------------------------------------------------------------------

    def _push_all(self) -> None:
        for to in range(self.size):
            if self._outgoing[to]:
                self._push(to)

    def _push(self, to: int) -> None:
        queue = self._outgoing[to]
        while queue:
            message = queue[0]
            if message.error is None:
                try:
                    if not self._push_piece(message, to) and not self._push_again(message, to):
                        return
                except LaunchError as error:
                    message.error = error
            if message.error is not None or to not in message.left:
                queue.popleft()
        if not any(self._outgoing):
            self.bells.wants_room(wants=False)

    def _push_again(self, message: Outgoing, to: int) -> bool:
        """There was no room: receivers ring when there is. Some may have made room just before."""
        self.bells.wants_room(wants=True)
        return self._push_piece(message, to)

    def _push_piece(self, message: Outgoing, to: int) -> bool:
        """Send the next piece; returns False if there is no room."""
        if self._sent[to] - self._numbers[self._taken_from_me_at[to]] >= _RING:
            return False
        if message.length <= self._inline:
            if message.length:
                at = self._entry_at(self.rank, to, self._sent[to])
                memmove(self._base + at + _HEAD_BYTES, message.address, message.length)
            self._tell(message, to, None, message.length)
            message.left.discard(to)
            return True
        place = message.next[to]
        fresh = place == len(message.pieces)
        if fresh:
            start = message.staged_bytes
            block = self._pool.take(message.length - start)
            if block is None:
                return False
            block.begin(message.to)
            message.pieces.append((block, start, min(block.size_bytes, message.length - start)))
        block, start, length = message.pieces[place]
        if fresh:
            self._fill(message, place, 0)
        self._tell(message, to, block, length)
        if fresh:
            for low in range(_CHUNK_BYTES, length, _CHUNK_BYTES):
                self._fill(message, place, low)
                self.bells.ring_one(to)
        message.next[to] += 1
        if start + length == message.length:
            message.left.discard(to)
        return True

    def _fill(self, message: Outgoing, at: int, low: int) -> None:
        """Copy a part of a piece to its block; receivers may take it then."""
        block, start, length = message.pieces[at]
        count = min(_CHUNK_BYTES, length - low)
        memmove(block.address + low, message.address + start + low, count)
        with self._fence:
            pass
        with self._fence:
            block.put(low + count)

    def _tell(self, message: Outgoing, to: int, block: Block | None, length: int) -> None:
        at = self._entry_at(self.rank, to, self._sent[to])
        where = (-1, 0, 0, 0) if block is None else (*block.handle, block.size_bytes)
        _HEAD.pack_into(self._raw, at, *message.key, message.length, length, *where)
        self._sent[to] += 1
        self._publish(self._sent_at[to], self._sent[to])
        self.bells.ring_one(to)

    # Receiving -----------------------------------------------------------------------------------

    def _drain(self, source: int) -> None:
        """Take the entries of a worker out of its ring."""
        if source == self.rank:
            return
        sent = self._numbers[self._sent_to_me_at[source]]
        if self._taken[source] == sent:
            return
        if not _IN_ORDER:
            with self._fence:  # what is read from here on is no older than the number
                pass
        while self._taken[source] < sent:
            at = self._entry_at(source, self.rank, self._taken[source])
            channel, tag, whole, length, fd, inode, device, size = _HEAD.unpack_from(self._raw, at)
            key = (source, (channel, tag))
            if fd < 0 and key in self._wanted and key not in self._arrived:
                self._take_at_once(key, self._base + at + _HEAD_BYTES, length)
            else:
                piece: bytes | Block
                if fd < 0:
                    piece = string_at(self._base + at + _HEAD_BYTES, length)
                    use = 0
                else:
                    try:
                        piece = self._mapped.find(source, Handle(fd, inode, device), size)
                    except (OSError, RuntimeError) as error:
                        # Its maker is gone, which whoever waits learns.
                        _log.debug("a message of worker %d cannot be read: %s", source, error)
                        return
                    use = piece.current_use()
                message = self._partial[source]
                if message is None:
                    message = _Arrival(whole)
                    self._arrived.setdefault(key, deque()).append(message)
                message.pieces.append((piece, use, length))
                message.told += length
                self._partial[source] = None if message.told == whole else message
            self._taken[source] += 1
            self._publish(self._taken_at[source], self._taken[source])
        self.bells.ring_for_room(source)

    def _take_at_once(self, key: tuple[int, Key], address: int, length: int) -> None:
        """Copy a short message to where it is wanted; nothing with this key has arrived before it."""
        queue = self._wanted[key]
        wanted = queue[0]
        wanted.sent_length = length
        if wanted.tensor is None:
            wanted.tensor = torch.empty(length, dtype=torch.uint8)
        if length and wanted.fits:
            memmove(wanted.tensor.data_ptr(), address, length)
        queue.popleft()
        if not queue:
            del self._wanted[key]
        wanted.done = True
        self._received += 1

    def _match(self, key: tuple[int, Key]) -> None:
        wanted, arrived = self._wanted.get(key), self._arrived.get(key)
        while wanted and arrived:
            if not self._copy(wanted[0], arrived[0]):
                return
            wanted.popleft().done = True
            arrived.popleft()
            self._received += 1
        if wanted is not None and not wanted:
            del self._wanted[key]
        if arrived is not None and not arrived:
            del self._arrived[key]

    def _copy(self, wanted: Incoming, message: _Arrival) -> bool:
        """Copy what is there; returns whether that is all. A message of another length is dropped."""
        if wanted.sent_length < 0:
            wanted.sent_length = message.length
            if wanted.tensor is None:
                wanted.tensor = torch.empty(message.length, dtype=torch.uint8)
        assert wanted.tensor is not None
        address = wanted.tensor.data_ptr()
        while message.pieces:
            piece, use, length = message.pieces[0]
            there = length if isinstance(piece, bytes) else min(length, piece.there_bytes())
            with self._fence:
                pass
            fresh = there - wanted.of_piece
            if fresh and wanted.fits:
                source = piece if isinstance(piece, bytes) else piece.address + wanted.of_piece
                memmove(address + wanted.copied, source, fresh)
            wanted.copied += fresh
            wanted.of_piece = there
            if there < length:
                return False
            if not isinstance(piece, bytes):
                piece.is_read(self.rank, use)
                self.bells.ring_for_room(wanted.source)
            message.pieces.popleft()
            wanted.of_piece = 0
        return wanted.copied == message.length

    # Numbers and places --------------------------------------------------------------------------

    def _place(self, row: int, source: int, to: int) -> int:
        return ((row * self.size + source) * self.size + to) * _LINE

    def _publish(self, place: int, number: int) -> None:
        if not _IN_ORDER:
            with self._fence:  # earlier writes become visible before the number
                pass
        with self._fence:  # whether others sleep is read after
            self._numbers[place] = number

    def _entry_at(self, source: int, to: int, number: int) -> int:
        """Where an entry begins, in bytes; behind its head are those of a short message."""
        return ((source * self.size + to) * _RING + number % _RING) * self._entry_bytes


def _inline_bytes(size: int) -> int:
    """How long the messages are that an entry holds."""
    fair = _ALL_RINGS_BYTES // (size * size * _RING)
    return min(_MOST_INLINE_BYTES, max(_LEAST_INLINE_BYTES, fair // 64 * 64))


def _parts(size: int) -> list[int]:
    """The bytes of the numbers, the bells and the rings."""
    rings = size * size * _RING * (_HEAD_BYTES + _inline_bytes(size))
    return [2 * size * size * _LINE * 8, Bells.size_bytes(size), rings]
