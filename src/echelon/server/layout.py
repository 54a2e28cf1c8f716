"""Where the parameters of a table lie: in the model, in shards on the servers, in pieces on the way.

A shard is one flat tensor per server. `TableLayout` knows which elements of it belong to which parameter,
and copies between the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import ConfigError
from echelon.server import shards


class TableLayout:
    """The places of these parameters on so many servers; `whole`: no parameter may be cut."""

    def __init__(self, parameters: Sequence[nn.Parameter], servers: int, *, whole: bool) -> None:
        self.parameters = list(parameters)
        self.dtype = _one_type(parameters)
        lengths = [p.numel() for p in parameters]
        item_bytes = self.dtype.itemsize
        self.shards = shards.shard(lengths, servers, item_bytes=item_bytes, whole=whole)
        self.pieces = shards.pieces(self.shards, item_bytes=item_bytes)
        self.piece_at = {(piece.shard, piece.start): piece for piece in self.pieces}
        self._parts_of: dict[int, list[tuple[shards.ShardPiece, shards.ParameterSlice]]] = {}
        for piece in self.pieces:
            for part in piece.parts:
                self._parts_of.setdefault(part.parameter, []).append((piece, part))

    def room(self) -> list[Tensor]:
        """A flat tensor of zeros for each shard."""
        return [torch.zeros(shard.length, dtype=self.dtype) for shard in self.shards]

    def pieces_of(self, place: int) -> set[tuple[int, int]]:
        """The shards and starts of the pieces that a parameter is in."""
        return {(piece.shard, piece.start) for piece, _ in self._parts_of[place]}

    def gather(self, flats: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Copy tensors that are shaped like the parameters into shards."""
        for shard, flat in zip(self.shards, flats, strict=True):
            for part in shard.parts:
                part_of(flat, part).copy_(cut_out(tensors[part.parameter], part))

    def spread(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """What shards hold, shaped like the parameters."""
        out = [torch.empty(p.shape, dtype=p.dtype) for p in self.parameters]
        for place, whole in enumerate(out):
            self._copy(flats, place, whole)
        return out

    def fill(self, flats: Sequence[Tensor], place: int) -> None:
        """Copy what shards hold of one parameter to where it belongs."""
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

    # The state of an optimizer lies beside the parameters --------------------------------------------

    def cut_states(self, state_of: dict[Any, dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """The states of each shard's parts; nothing if there are none."""
        if not any(state_of.get(p) for p in self.parameters):
            return []
        return [[self._cut(state_of, part) for part in shard.parts] for shard in self.shards]

    def _cut(self, state_of: dict[Any, dict[str, Any]], part: shards.ParameterSlice) -> dict[str, Any]:
        p = self.parameters[part.parameter]
        state = {}
        for name, value in state_of.get(p, {}).items():
            if not isinstance(value, Tensor):
                state[name] = value
            elif value.shape == p.shape and part.length < p.numel():
                state[name] = cut_out(value, part).clone()
            else:
                state[name] = value.clone()
        return state

    def join_states(self, of_shards: Iterable[tuple[int, Sequence[dict[str, Any]]]]) -> dict[Any, Any]:
        """The states of whole parameters, from those of shards' parts."""
        whole: dict[int, dict[str, Any]] = {}
        for index, parts in of_shards:
            for part, state in zip(self.shards[index].parts, parts, strict=True):
                for name, value in state.items():
                    self._put(whole.setdefault(part.parameter, {}), name, value, part)
        return {self.parameters[place]: state for place, state in whole.items()}

    def _put(self, whole: dict[str, Any], name: str, value: Any, part: shards.ParameterSlice) -> None:
        if not isinstance(value, Tensor) or not value.dim() or value.numel() != part.length:
            whole[name] = value
            return
        if name not in whole:
            whole[name] = torch.zeros(self.parameters[part.parameter].shape, dtype=value.dtype)
        cut_out(whole[name], part).copy_(value.reshape(-1))


def cut_out(tensor: Tensor, part: shards.ParameterSlice) -> Tensor:
    """The elements of a parameter, or of what is shaped like it, that are in a part."""
    return tensor.reshape(-1)[part.start : part.stop]


def part_of(flat: Tensor, part: shards.ParameterSlice) -> Tensor:
    """The elements of a shard that are a part."""
    return flat[part.at : part.at + part.length]


def _one_type(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    kinds = {p.dtype for p in parameters}
    if len(kinds) != 1:
        raise ConfigError(
            f"a parameter server keeps one type of numbers, and these are {sorted(map(str, kinds))}",
            where="--sync",
            fix="convert the model to one type, give each type an optimizer of its own, or use --sync full",
        )
    return kinds.pop()
