"""The format of a message on the wire: frames, each with a header that reveals wrong frames.

    magic | view | sequence | operation | message | size | offset | length | payload's seal | seal | payload

A message is cut into frames, so that an urgent one can overtake and a piece can be added while it is in the
cache. `sequence` counts the frames of a connection, which reveals replayed and lost frames. The payload
belongs to message number `message` that this pair exchanges in `operation`; operation 0 is for notices
(`notices.py`). `size` is that of the whole message, so that a wrong size is noticed at the first frame.
One seal guards the payload, another one the header with the first (`seals.py`): a header is checked before
anything in it is believed, a payload before it is added or counted as received. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from echelon.comm.wire.seals import HEADER, PAYLOAD, SEAL_BYTES, Seal
from echelon.errors import Corrupt, StaleView

_HEADER = struct.Struct(f"<4s16sQQIQQI{SEAL_BYTES}s")
_MAGIC = b"ECH2"
HEADER_BYTES = _HEADER.size + SEAL_BYTES
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
    payload_seal: bytes

    def pack(self, seal: Seal) -> bytes:
        """The header's bytes, with a seal."""
        data = _HEADER.pack(
            _MAGIC,
            self.view,
            self.sequence,
            self.operation,
            self.message,
            self.size,
            self.offset,
            self.length,
            self.payload_seal,
        )
        return data + seal.of(self.sequence, HEADER, data)


def unpack(
    data: bytes | bytearray | memoryview, *, seal: Seal, view: bytes, sequence: int, peer: str
) -> Header:
    """Read a header; raise Corrupt or StaleView if it is wrong. `sequence` is the number that is due."""
    body = memoryview(data)[: _HEADER.size]
    magic, *rest = _HEADER.unpack(body)
    where = f"frame {sequence}"
    if magic != _MAGIC:
        raise Corrupt(f"{peer} sent bytes that are not a frame", where=where)
    if not seal.fits(bytes(data[_HEADER.size :]), sequence, HEADER, body):
        if seal.keyed:
            raise not_authentic(peer, sequence)
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


def check_payload(header: Header, payload: memoryview, *, seal: Seal, peer: str) -> None:
    """Raise Corrupt if these are not the bytes that the header was made for."""
    if not seal.fits(header.payload_seal, header.sequence, PAYLOAD, payload):
        if seal.keyed:
            raise not_authentic(peer, header.sequence)
        raise Corrupt(f"{peer} sent a damaged frame", where=f"frame {header.sequence}")


def not_authentic(peer: str, number: int) -> Corrupt:
    """The error for a frame or message with a wrong seal."""
    return Corrupt(
        f"what arrived from {peer} is not what it sent: it was changed, repeated, left out or put in "
        "another order on its way",
        where=f"frame {number}",
        fix="look for a program or device between the two machines that changes traffic",
    )


def checksum(payload: memoryview) -> int:
    """A fast checksum of a whole message, for protocols above frames."""
    return xxhash.xxh3_64_intdigest(payload) if len(payload) else 0
