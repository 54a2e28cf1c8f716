"""Short messages from one process to another of its machine, in memory that both map.

The memory begins with two numbers, in cache lines of their own: how many bytes were written, and how many
were read, since the beginning. The rest is a ring of entries:

    header length     4 bytes; -1: the rest of the ring is unused, and the next entry is at its beginning
    payload length    4 bytes
    header, payload   up to a multiple of 8 bytes

An entry with an empty header is a mark: the next message of this sender comes by another way. So the ring
gives the order of all messages, also of those that do not fit into it. Room for marks is kept free.
"""

from __future__ import annotations

import struct
import threading

import torch
from torch import Tensor

RING_BYTES = 64 * 1024
MOST_BYTES = 8 * 1024  # of a message in a ring
_HEAD_BYTES = 128
_WRITTEN, _READ = 0, 8  # places of the numbers
_LENGTHS = struct.Struct("<ii")
_KEPT_FREE_BYTES = 2 * MOST_BYTES
_UNUSED = -1
_NOTHING = memoryview(b"")


class MessageRing:
    """One sender's messages to one receiver; both have this object, over the same memory of zeros."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._numbers = memory[:_HEAD_BYTES].view(torch.int64).numpy().data
        self._entries = memory[_HEAD_BYTES:].numpy().data
        self._size = len(self._entries)
        self._fence = threading.Lock()

    @property
    def is_used(self) -> bool:
        """Whether anything was ever written."""
        return bool(self._numbers[_WRITTEN])

    @property
    def has_entries(self) -> bool:
        """Whether there is an entry to take."""
        return bool(self._numbers[_WRITTEN] != self._numbers[_READ])

    # The sender ----------------------------------------------------------------------------------

    def put(self, header: bytes, payload: memoryview = _NOTHING) -> bool:
        """Write a message; False if it does not fit now, and must go by another way after a mark."""
        return self._write(header, payload, _KEPT_FREE_BYTES)

    def mark(self) -> bool:
        """Write that the next message comes by another way; False if there is no room even for this."""
        return self._write(b"", _NOTHING, 0)

    def _write(self, header: bytes, payload: memoryview, keep_free_bytes: int) -> bool:
        written, entries = self._numbers[_WRITTEN], self._entries
        at, length = written % self._size, _entry_bytes(len(header), len(payload))
        skipped = self._size - at if at + length > self._size else 0
        if self._size - (written - self._numbers[_READ]) < length + skipped + keep_free_bytes:
            return False
        with self._fence:  # the room was read before it is written to
            pass
        if skipped:
            _LENGTHS.pack_into(entries, at, _UNUSED, 0)
            at = 0
        _LENGTHS.pack_into(entries, at, len(header), len(payload))
        at += _LENGTHS.size
        entries[at : at + len(header)] = header
        at += len(header)
        entries[at : at + len(payload)] = payload
        with self._fence:  # the entry becomes visible before the number
            self._numbers[_WRITTEN] = written + skipped + length
        with self._fence:  # and the number before the sender looks whether the receiver sleeps
            pass
        return True

    # The receiver --------------------------------------------------------------------------------

    def take(self) -> tuple[bytes, bytes] | None:
        """The next header and payload, (b"", b"") for a mark, None if there is no entry."""
        read, entries = self._numbers[_READ], self._entries
        if self._numbers[_WRITTEN] == read:
            return None
        with self._fence:  # what is read from here on is no older than the number
            pass
        at = read % self._size
        header_bytes, payload_bytes = _LENGTHS.unpack_from(entries, at)
        if header_bytes == _UNUSED:
            read, at = read + self._size - at, 0
            header_bytes, payload_bytes = _LENGTHS.unpack_from(entries, at)
        begin = at + _LENGTHS.size
        middle = begin + header_bytes
        header, payload = bytes(entries[begin:middle]), bytes(entries[middle : middle + payload_bytes])
        with self._fence:
            self._numbers[_READ] = read + _entry_bytes(header_bytes, payload_bytes)
        return header, payload


def _entry_bytes(header_bytes: int, payload_bytes: int) -> int:
    return _LENGTHS.size + -(-(header_bytes + payload_bytes) // 8) * 8
