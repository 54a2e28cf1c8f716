"""How does a worker get the whole state of another? As a tree, in pieces that carry checksums.

Messages go over the data path: shared memory or TCP. A piece that arrives damaged is never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from echelon.checkpoint import state_tree
from echelon.comm.group import Group
from echelon.errors import Corrupt

_PIECE_BYTES = 8 << 20
_TAG = 1 << 30


def send(group: Group, state: dict[str, Any], to: Sequence[int]) -> None:
    """Send a state to some members."""
    data = torch.frombuffer(bytearray(state_tree.pack(state)), dtype=torch.uint8)
    pieces = data.split(_PIECE_BYTES)
    checksums = torch.tensor([_checksum(piece) for piece in pieces])
    for member in to:
        group.send(torch.tensor([data.numel()]), member, _TAG).wait()
        group.send(checksums, member, _TAG).wait()
        for piece in pieces:
            group.send(piece, member, _TAG).wait()


def receive(group: Group, source: int) -> dict[str, Any]:
    """The state that a member sends."""
    length = int(group.receive(torch.zeros(1, dtype=torch.int64), source, _TAG).wait())
    data = torch.empty(length, dtype=torch.uint8)
    pieces = data.split(_PIECE_BYTES)
    checksums = group.receive(torch.zeros(len(pieces), dtype=torch.int64), source, _TAG).wait().tolist()
    for piece, checksum in zip(pieces, checksums, strict=True):
        group.receive(piece, source, _TAG).wait()
        if _checksum(piece) != checksum:
            raise Corrupt(f"rank {source} sent a damaged state", ranks=(source,), where="coming back")
    state: dict[str, Any] = state_tree.unpack(data.numpy().tobytes())
    return state


def _checksum(piece: Tensor) -> int:
    return xxhash.xxh3_64_intdigest(piece.numpy().data) >> 1
