"""The bytes of several pieces in one message: a message. Pure.

    complaint  rank, parameter   of a gradient that is not finite; (65535, 65535) if there is none
    used       one bit for each parameter of the bucket: whether its gradient was computed
    lengths    of each piece's bytes, 4 bytes each
    bytes      of each piece

All workers know from the bucket which pieces a message holds; one that complains holds none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.errors import Corrupt

_HEAD = struct.Struct("<HH")
_NONE = 0xFFFF


class NonFinite(NamedTuple):
    """Whose gradient of which parameter of the bucket is not finite."""

    rank: int
    parameter: int


class EncodedMessage(NamedTuple):
    """What a message says."""

    used: list[bool]
    payloads: list[Tensor]
    complaint: NonFinite | None = None


def write(message: EncodedMessage) -> Tensor:
    """A message as bytes."""
    head = _HEAD.pack(*(message.complaint or (_NONE, _NONE)))
    used = np.packbits(np.array(message.used, dtype=bool)).tobytes()
    lengths = np.array([payload.numel() for payload in message.payloads], dtype="<u4").tobytes()
    front = torch.frombuffer(bytearray(head + used + lengths), dtype=torch.uint8)
    return torch.cat([front, *message.payloads])


def read(data: Tensor, parameters: int, pieces: int, sender: str) -> EncodedMessage:
    """Bytes as a message; Corrupt if they are none of so many parameters and pieces."""
    raw = data.numpy()
    used_bytes = (parameters + 7) // 8
    front = _HEAD.size + used_bytes
    if len(raw) < front:
        raise _odd(sender, f"{len(raw)} bytes where the head alone has {front}")
    complaint = NonFinite(*_HEAD.unpack(raw[: _HEAD.size].tobytes()))
    if complaint.rank != _NONE:
        pieces = 0
    front += 4 * pieces
    if len(raw) < front:
        raise _odd(sender, f"{len(raw)} bytes where the lengths alone end at {front}")
    used = np.unpackbits(raw[_HEAD.size : _HEAD.size + used_bytes], count=parameters).astype(bool)
    lengths = np.frombuffer(raw[front - 4 * pieces : front].tobytes(), "<u4").tolist() if pieces else []
    if front + sum(lengths) != len(raw):
        raise _odd(sender, f"{len(raw)} bytes where {front + sum(lengths)} were announced")
    return EncodedMessage(
        used.tolist(),
        list(torch.split(data[front:], lengths)) if lengths else [],
        None if complaint.rank == _NONE else complaint,
    )


def _odd(sender: str, what: str) -> Corrupt:
    return Corrupt(
        f"{sender} sent encoded gradients that cannot be read: {what}",
        where="codec",
        fix="all workers must use the same codec, model and version of Echelon",
    )


def either(used: Sequence[Sequence[bool]]) -> list[bool]:
    """Which parameters anybody used."""
    return [any(flags) for flags in zip(*used, strict=True)]
