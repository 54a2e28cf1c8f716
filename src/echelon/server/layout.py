"""Which server keeps which elements of the parameters, and copies between parameters and shards.

A shard is one flat tensor per server. The split is pure: the same sizes give the same shards everywhere. A
large parameter whose optimizer updates every element by itself is split into equal parts, one for each
server. Any other parameter goes whole to the server that has least. So all servers keep about as many
bytes.

The parts of a shard lie in the order in which backward reaches them, from the last parameter to the first.
They are sent in pieces of about `piece_bytes`, each as soon as its gradients are ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError

LARGE_BYTES = 64 << 10
PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """Elements `start` to `stop` of a parameter; they begin at element `at` of their shard."""

    parameter: int
    start: int
    stop: int
    at: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Parts of a shard that are sent together: its elements `start` to `stop`."""

    shard: int
    start: int
    stop: int
    parts: tuple[ParameterSlice, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """The elements that one server keeps."""

    parts: tuple[ParameterSlice, ...]
    length: int


def split(
    lengths: Sequence[int], servers: int, *, item_bytes: int, whole: bool = False
) -> tuple[Shard, ...]:
    """Split parameters of these lengths, in the model's order; `whole`: keep each in one shard."""
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


def cut_pieces(
    shards: Sequence[Shard], *, item_bytes: int, piece_bytes: int = PIECE_BYTES
) -> tuple[ShardPiece, ...]:
    """The pieces of all shards, in the order in which backward completes them."""
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


class TableLayout:
    """The shards of these parameters on `servers` servers; `whole`: no parameter is split."""

    def __init__(self, parameters: Sequence[nn.Parameter], servers: int, *, whole: bool) -> None:
        self.parameters = list(parameters)
        self.dtype = _only_dtype(parameters)
        lengths = [p.numel() for p in parameters]
        item_bytes = self.dtype.itemsize
        self.shards = split(lengths, servers, item_bytes=item_bytes, whole=whole)
        self.pieces = cut_pieces(self.shards, item_bytes=item_bytes)
        self.piece_at = {(piece.shard, piece.start): piece for piece in self.pieces}
        self.pieces_in: dict[int, list[tuple[int, int]]] = {}  # by shard: shard and start of its pieces
        for shard, start in self.piece_at:
            self.pieces_in.setdefault(shard, []).append((shard, start))
        self._parts_of: dict[int, list[tuple[ShardPiece, ParameterSlice]]] = {}
        for piece in self.pieces:
            for part in piece.parts:
                self._parts_of.setdefault(part.parameter, []).append((piece, part))

    def new_flats(self) -> list[Tensor]:
        """A flat tensor of zeros for each shard."""
        return [torch.zeros(shard.length, dtype=self.dtype) for shard in self.shards]

    def pieces_of(self, place: int) -> set[tuple[int, int]]:
        """The pieces of a parameter, as shard and start."""
        return {(piece.shard, piece.start) for piece, _ in self._parts_of[place]}

    def to_shards(self, flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy tensors that are shaped like the parameters into the shards' flat tensors."""
        for shard, flat in zip(self.shards, flats, strict=True):
            for part in shard.parts:
                part_of(flat, part).copy_(slice_of(tensors[part.parameter], part))

    def from_shards(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The shards' values, shaped like the parameters."""
        out = [torch.empty(p.shape, dtype=p.dtype) for p in self.parameters]
        for place, whole in enumerate(out):
            self._copy(flats, place, whole)
        return out

    def install(self, flats: Sequence[Tensor], place: int) -> None:
        """Copy the shards' values of one parameter into the parameter."""
        p = self.parameters[place]
        if p.is_contiguous():
            self._copy(flats, place, p.detach())
        else:
            whole = torch.empty(p.shape, dtype=p.dtype, device=p.device)
            self._copy(flats, place, whole)
            p.copy_(whole)

    def _copy(self, flats: Sequence[Tensor], place: int, whole: Tensor) -> None:
        for piece, part in self._parts_of[place]:
            whole.view(-1)[part.start : part.stop].copy_(part_of(flats[piece.shard], part))

    # Optimizer states ----------------------------------------------------------------------------

    def split_states(self, state_of: dict[Any, dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The optimizer states of each shard's parts; empty if there are no states."""
        if not any(state_of.get(p) for p in self.parameters):
            return []
        return [[self._part_state(state_of, part) for part in shard.parts] for shard in self.shards]

    def _part_state(self, state_of: dict[Any, dict[str, Any]], part: ParameterSlice) -> dict[str, Any]:
        p = self.parameters[part.parameter]
        state = {}
        for name, value in state_of.get(p, {}).items():
            if not isinstance(value, Tensor):
                state[name] = value
            elif value.shape == p.shape and part.length < p.numel():
                state[name] = slice_of(value, part).clone()
            else:
                state[name] = value.clone()
        return state

    def join_states(self, of_shards: Iterable[tuple[int, Sequence[dict[str, Any]]]]) -> dict[Any, Any]:
        """The states of whole parameters, from the states of the shards' parts."""
        whole: dict[int, dict[str, Any]] = {}
        for index, parts in of_shards:
            for part, state in zip(self.shards[index].parts, parts, strict=True):
                for name, value in state.items():
                    self._join_part(whole.setdefault(part.parameter, {}), name, value, part)
        return {self.parameters[place]: state for place, state in whole.items()}

    def _join_part(self, whole: dict[str, Any], name: str, value: Any, part: ParameterSlice) -> None:
        if not isinstance(value, Tensor) or not value.dim() or value.numel() != part.length:
            whole[name] = value
            return
        if name not in whole:
            whole[name] = torch.zeros(self.parameters[part.parameter].shape, dtype=value.dtype)
        slice_of(whole[name], part).copy_(value.reshape(-1))


def slice_of(tensor: Tensor, part: ParameterSlice) -> Tensor:
    """A part's elements of a parameter, or of a tensor that is shaped like it."""
    return tensor.reshape(-1)[part.start : part.stop]


def part_of(flat: Tensor, part: ParameterSlice) -> Tensor:
    """A part's elements of its shard."""
    return flat[part.at : part.at + part.length]


def _only_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    kinds = {p.dtype for p in parameters}
    if len(kinds) != 1:
        raise ConfigError(
            f"a parameter server keeps parameters of one dtype, and these have {sorted(map(str, kinds))}",
            where="--sync",
            fix="convert the model to one dtype, give each dtype its own optimizer, or use --sync full",
        )
    return kinds.pop()
