"""What a server keeps of one optimizer: its own shard of the parameters, and replicas of others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from echelon.errors import ConfigError
from echelon.server import encoding, layout, optimizer_spec
from echelon.server.coordinator import Coordinator
from echelon.server.protocol import OpenTable
from echelon.sync.families.serve import ServePolicy
from echelon.sync.families.shard import ShardState
from echelon.sync.policy import POLICIES

_SPARE_PUSHES = 4


@dataclass(slots=True)
class KeptShard:
    """A shard that this server keeps, its own or a replica of another's."""

    index: int
    state: ShardState
    optimizer: torch.optim.Optimizer
    pieces: tuple[layout.ShardPiece, ...]
    shadows: encoding.Shadows | None = None

    def piece_at(self, start: int) -> layout.ShardPiece | None:
        """The piece that begins at this element."""
        return next((piece for piece in self.pieces if piece.start == start), None)


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def _dtype(name: str) -> torch.dtype:
    """The type of that name, which came over the network."""
    if name not in _DTYPES:
        raise ConfigError(
            f"a parameter server keeps no parameters of type {name}",
            where="--sync",
            fix=f"train with one of {', '.join(_DTYPES)}, or with --sync full",
        )
    return _DTYPES[name]


class KeptTable:
    """One optimizer's parameters, as far as this server keeps them."""

    def __init__(self, opening: OpenTable, server: int, servers: int) -> None:
        policy = POLICIES.build(opening.policy).resolved()
        assert isinstance(policy, ServePolicy)
        self.opening = opening
        self.policy = policy
        self.dtype = _dtype(opening.dtype)
        lengths = [torch.Size(shape).numel() for shape in opening.shapes]
        self.shards = layout.split(lengths, servers, item_bytes=self.dtype.itemsize, whole=opening.whole)
        self.pieces = layout.cut_pieces(self.shards, item_bytes=self.dtype.itemsize)
        self.codec = encoding.open_codec(opening.codec, self.dtype, opening.table, opening.shapes)
        # Workers that take steps of their own in between get whole weights, not changes.
        steady = policy.push_every == policy.pull_every == 1 and policy.pushes == "gradient"
        self.sends_changes = self.codec is not None and steady
        self.worker_of = {rank: worker for worker, rank in enumerate(opening.workers)}
        self.alone: set[int] = set()  # ranks of workers that train on weights of their own for now
        kept = [(server - copy) % servers for copy in range(opening.replicas + 1)]
        self.own = server
        self.kept = {index: self._keep(index) for index in kept if self.shards[index].length}
        self.coordinator: Coordinator | None = None

    def _keep(self, index: int) -> KeptShard:
        parts = self.shards[index].parts
        flat = torch.zeros(self.shards[index].length, dtype=self.dtype)
        views = [self._view(flat, part) for part in parts]
        groups = [self.opening.groups[part.parameter] for part in parts]
        optimizer = optimizer_spec.build(self.opening.optimizer, views, groups)
        state = ShardState(
            self.policy,
            flat,
            views,
            optimizer.step,
            spare=_SPARE_PUSHES,
            configure=partial(optimizer_spec.update, optimizer),
        )
        pieces = tuple(piece for piece in self.pieces if piece.shard == index)
        return KeptShard(index, state, optimizer, pieces, self._shadows(index, flat))

    def _shadows(self, index: int, flat: Tensor) -> encoding.Shadows | None:
        """Needed to send changes of a shard, and to correct gradients by the weights that workers had."""
        if self.codec is None or not self.sends_changes or not (index == self.own or self.policy.amends):
            return None
        return encoding.Shadows(self.codec, flat, len(self.opening.workers))

    def _view(self, flat: Tensor, part: layout.ParameterSlice) -> Tensor:
        view = flat[part.at : part.at + part.length]
        shape = self.opening.shapes[part.parameter]
        whole = part.length == torch.Size(shape).numel()
        return (view.view(shape) if whole else view).requires_grad_(True)

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state of this server's own shard, part by part."""
        kept = self.kept[self.own]
        return {"parts": [dict(kept.optimizer.state[p]) for p in kept.state.parameters]}

    def set_optimizer_state(self, index: int, state: dict[str, Any]) -> None:
        """Load a state that `optimizer_state` returned."""
        kept = self.kept[index]
        for p, saved in zip(kept.state.parameters, state["parts"], strict=True):
            if saved:
                kept.optimizer.state[p] = saved
