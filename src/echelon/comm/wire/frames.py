"""How a message looks on the wire: frames, each with a header that lets a wrong one be refused.

    magic | view id | sequence | operation | message | size | offset | length | checksum | check | payload

A message is cut into frames, so that an urgent one can overtake and a piece can be added while it is in the
cache. `sequence` counts the frames of a connection: a replayed or lost one does not fit. `operation`
and `message` say what the payload belongs to: the message-th one that this pair exchanges in that
operation; operation 0 is for what workers tell each other beside (`comm/notices.py`). `size` is that of the
whole message, so that one of the wrong size is noticed at its first frame. `checksum` guards the payload,
`check` the header. Nothing is ever unpickled.
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
FRAME_BYTES = 512 * 1024  # fits the cache of a core, and is few enough frames for Python
MOST_FRAME_BYTES = 16 * 1024 * 1024
NOTICES = 0  # the operation that no group ever has


@dataclass(frozen=True, slots=True)
class Header:
    """What a frame says about its payload."""

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
    """Read a header and refuse what cannot be meant for us."""
    body = memoryview(data)[: _HEADER.size]
    magic, *rest = _HEADER.unpack(body)
    where = f"frame {sequence}"
    if magic != _MAGIC:
        raise Corrupt(f"{peer} sent bytes that are no frame", where=where)
    if _CHECK.unpack_from(data, _HEADER.size) != (xxhash.xxh32_intdigest(body),):
        raise Corrupt(f"{peer} sent a frame with a damaged header", where=where)
    header = Header(*rest)
    if header.view != view:
        raise StaleView(f"{peer} speaks for another view", where=where)
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
