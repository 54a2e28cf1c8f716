"""Messages on a stream of bytes, each with a seal: for the meeting service and for streams of events.

    length in 4 bytes | message | seal of 16 bytes

A message's number is part of its seal (`seals.py`), so none can be changed, repeated, left out or put in
another order. `MessageReader` has no socket: bytes in, messages out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from echelon.comm.wire.frames import not_authentic
from echelon.comm.wire.seals import MESSAGE, SEAL_BYTES, Keys, seals_of
from echelon.errors import Corrupt

_LENGTH = struct.Struct("<I")


class MessageWriter:
    """Seals the messages of one direction."""

    def __init__(self, keys: Keys | None) -> None:
        self._seal, _ = seals_of(keys)
        self._number = 0

    def sealed(self, message: bytes) -> bytes:
        """The bytes to send for the next message."""
        body = _LENGTH.pack(len(message)) + message
        self._number += 1
        return body + self._seal.of(self._number, MESSAGE, body)


class MessageReader:
    """Cuts the bytes of one direction into messages of at most `longest_bytes`."""

    def __init__(self, keys: Keys | None, *, peer: str, longest_bytes: int) -> None:
        _, self._seal = seals_of(keys)
        self._number = 0
        self._peer = peer
        self._longest_bytes = longest_bytes
        self._unread = bytearray()

    def messages(self, data: bytes) -> Iterator[bytes]:
        """The messages that are complete with these bytes; raises Corrupt if one is not what was sent."""
        self._unread += data
        while len(self._unread) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread)
            if length > self._longest_bytes:
                raise Corrupt(f"{self._peer} announced a message of {length} bytes", where=self._peer)
            end = _LENGTH.size + length
            if len(self._unread) < end + SEAL_BYTES:
                return
            body, seal = bytes(self._unread[:end]), bytes(self._unread[end : end + SEAL_BYTES])
            del self._unread[: end + SEAL_BYTES]
            self._number += 1
            if not self._seal.fits(seal, self._number, MESSAGE, body):
                raise not_authentic(self._peer, self._number)
            yield body[_LENGTH.size :]
