"""Which server keeps which part of the parameters. Pure: the same sizes give the same parts everywhere.

A parameter is cut into equal parts, one for each server, if it is large and its optimizer updates every
element by itself; others go whole to the server that has least. So all servers hold about as many bytes.

A shard's parts lie in the order in which backward reaches them, from the last parameter to the first, and
are sent in pieces of about `piece_bytes`, each as soon as its gradients are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

LARGE_BYTES = 64 << 10
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Elements `start` to `stop` of a parameter, which are at `at` of their shard."""

    parameter: int
    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """How many elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Parts of a shard that travel together: elements `start` to `stop` of it."""

    shard: int
    start: int
    stop: int
    parts: tuple[ParameterSlice, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """What one server keeps."""

    parts: tuple[ParameterSlice, ...]
    length: int


def shard(
    lengths: Sequence[int], servers: int, *, item_bytes: int, whole: bool = False
) -> tuple[Shard, ...]:
    """Share out parameters of these lengths, in the model's order; `whole`: none may be cut."""
    parts: list[list[ParameterSlice]] = [[] for _ in range(servers)]
    filled = [0] * servers

    def put(server: int, parameter: int, start: int, stop: int) -> None:
        parts[server].append(ParameterSlice(parameter, start, stop, filled[server]))
        filled[server] += stop - start

    for parameter in reversed(range(len(lengths))):
        length = lengths[parameter]
        if servers > 1 and not whole and length * item_bytes >= LARGE_BYTES * servers:
            bounds = [length * part // servers for part in range(servers + 1)]
            for server, (start, stop) in enumerate(pairwise(bounds)):
                put(server, parameter, start, stop)
        else:
            put(min(range(servers), key=filled.__getitem__), parameter, 0, length)
    return tuple(Shard(tuple(mine), length) for mine, length in zip(parts, filled, strict=True))


def pieces(
    shards: Sequence[Shard], *, item_bytes: int, piece_bytes: int = PIECE_BYTES
) -> tuple[ShardPiece, ...]:
    """All shards' pieces, in the order in which backward completes them."""
    found: list[tuple[int, ShardPiece]] = []
    for index, one in enumerate(shards):
        held: list[ParameterSlice] = []
        for part in one.parts:
            held.append(part)
            if (part.at + part.length - held[0].at) * item_bytes >= piece_bytes:
                found.append(_piece(index, held))
                held = []
        if held:
            found.append(_piece(index, held))
    return tuple(piece for _, piece in sorted(found, key=lambda pair: (-pair[0], pair[1].shard)))


def _piece(index: int, parts: list[ParameterSlice]) -> tuple[int, ShardPiece]:
    last = parts[-1]
    first = min(part.parameter for part in parts)
    return first, ShardPiece(index, parts[0].at, last.at + last.length, tuple(parts))
