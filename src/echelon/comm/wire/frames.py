"""The format of a message on the wire: frames, each with a header that reveals wrong frames.

    magic | view id | sequence | operation | message | size | offset | length | checksum | check | payload

A message is cut into frames, so that an urgent one can overtake and a piece can be added while it is in the
cache. `sequence` counts the frames of a connection, which reveals replayed and lost frames. The payload
belongs to message number `message` that this pair exchanges in `operation`; operation 0 is for notices
(`notices.py`). `size` is that of the whole message, so that a wrong size is noticed at the first frame.
`checksum` guards the payload, `check` the header. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from echelon.errors import Corrupt, StaleView

_HEADER = struct.Struct("<4s16sQQIQQIQ")
_CHECK = struct.Struct("<I")
_MAGIC = b"ECH1"
HEADER_BYTES = _HEADER.size + _CHECK.size
FRAME_BYTES = 512 * 1024  # fits the cache of a core, and keeps frames few
MOST_FRAME_BYTES = 16 * 1024 * 1024
NOTICES = 0  # an operation number that groups never use
CHANNEL_BITS = 40  # a tag is a channel, shifted by so many bits, plus a number in order of submission


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame."""

    view: bytes
    sequence: int
    operation: int
    message: int
    size: int
    offset: int
    length: int
    checksum: int

    def pack(self) -> bytes:
        """The header's bytes."""
        data = _HEADER.pack(
            _MAGIC,
            self.view,
            self.sequence,
            self.operation,
            self.message,
            self.size,
            self.offset,
            self.length,
            self.checksum,
        )
        return data + _CHECK.pack(xxhash.xxh32_intdigest(data))


def unpack(data: bytes | bytearray | memoryview, *, view: bytes, sequence: int, peer: str) -> Header:
    """Read a header; raise Corrupt or StaleView if it is wrong."""
    body = memoryview(data)[: _HEADER.size]
    magic, *rest = _HEADER.unpack(body)
    where = f"frame {sequence}"
    if magic != _MAGIC:
        raise Corrupt(f"{peer} sent bytes that are not a frame", where=where)
    if _CHECK.unpack_from(data, _HEADER.size) != (xxhash.xxh32_intdigest(body),):
        raise Corrupt(f"{peer} sent a frame with a damaged header", where=where)
    header = Header(*rest)
    if header.view != view:
        raise StaleView(f"{peer} belongs to another view", where=where)
    if header.sequence != sequence:
        raise Corrupt(
            f"{peer} sent frame {header.sequence} where {sequence} was due", where="replayed or lost"
        )
    if header.length > MOST_FRAME_BYTES:
        raise Corrupt(f"{peer} announced a frame of {header.length} bytes", where=where)
    if header.offset + header.length > header.size:
        raise Corrupt(f"{peer} sent a frame that reaches beyond its message", where=where)
    return header


def checksum(payload: memoryview) -> int:
    """A fast checksum of a payload."""
    return xxhash.xxh3_64_intdigest(payload) if len(payload) else 0
