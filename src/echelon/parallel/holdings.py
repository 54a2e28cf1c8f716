"""Which worker holds which parameters, and how do the others get them when they are needed?

After the cut a worker keeps the parameters of its own layers. Of the others it keeps shape and type only:
their values read as NaN and take no memory. Whoever reads the whole model (`state_dict`, a checkpoint)
calls `whole` first, on all workers, and `part` afterwards.

A parameter may be held by several workers: one in each replica, and one for each stage that uses it. Its
gradient is the sum over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.parallel.split import Gradients


@dataclass(frozen=True, slots=True)
class _Owned:
    """The trained parameters, by position, that the same workers hold."""

    group: Group
    positions: tuple[int, ...]


class Holdings:
    """The parameters and buffers of one model. `owners`: the ranks that hold each, by name, ascending.

    `apart`: sets of ranks that do not sum with each other, such as replicas that divide states; empty: all
    owners sum.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        owners: Mapping[str, Sequence[int]],
        apart: Sequence[Sequence[int]] = (),
    ) -> None:
        self._apart = apart or [range(group.size)]
        self._group = group
        named = dict(model.named_parameters())
        self._named = {name: (p, tuple(owners[name])) for name, p in named.items()}
        self._buffers = {name: (b, tuple(owners[name])) for name, b in model.named_buffers()}
        rank = group.rank
        self.own = [p for p, ranks in self._named.values() if rank in ranks and p.requires_grad]
        self._shapes = [p.shape for p in self.own]  # parameters may be slices meanwhile
        self.counted = [
            p for p, ranks in self._named.values() if rank == _counts(ranks) and p.requires_grad
        ]
        self.buffers = [b for b, ranks in self._buffers.values() if rank in ranks]
        self.others = {p for p, ranks in self._named.values() if rank not in ranks}
        self._sums = self._groups()

    def first_owner(self, parameter: nn.Parameter) -> int:
        """The worker whose values of a parameter are saved."""
        return next(ranks[0] for p, ranks in self._named.values() if p is parameter)

    def _groups(self) -> list[_Owned]:
        """A group for each set of workers that hold the same parameters; all workers call it alike."""
        position = {id(p): at for at, p in enumerate(self.own)}
        summed = {
            (ranks, summing)
            for _, ranks in self._named.values()
            for part in self._apart
            if len(summing := tuple(rank for rank in ranks if rank in part)) > 1
        }
        found = []
        for ranks, summing in sorted(summed):
            group = self._group.subgroup(summing)
            held = [p for p, owners in self._named.values() if owners == ranks]
            if group is not None:
                found.append(_Owned(group, tuple(position[id(p)] for p in held if id(p) in position)))
        return found

    # Values ----------------------------------------------------------------------------------------

    def part(self) -> None:
        """Keep only what this worker holds."""
        for p, ranks in self._named.values():
            if self._group.rank not in ranks:
                p.data = torch.full((), torch.nan, dtype=p.dtype).expand(p.shape)
                p.grad = None

    def room(self) -> None:
        """Make room for what other workers hold."""
        for p in self.others:
            p.data = torch.empty(p.shape, dtype=p.dtype)

    def whole(self) -> None:
        """Give every worker all parameters and buffers; all call this together."""
        self.room()
        held = [(tensor.data, ranks) for tensor, ranks in (*self._named.values(), *self._buffers.values())]
        for (source, _), tensors in _by_source(held).items():
            _share(self._group, tensors, source)

    def share_buffers(self) -> None:
        """Give every worker the buffers of their first owners; all call this together."""
        for (source, _), tensors in _by_source(self._buffers.values()).items():
            _share(self._group, tensors, source)

    # Gradients ---------------------------------------------------------------------------------------

    def reduce(self, gradients: Gradients) -> int:
        """Sum the gradients of `own` over all owners, in place; returns the bytes that were sent.

        A parameter without a gradient on every owner keeps none.
        """
        flights: list[tuple[_Owned, list[int], Tensor, Future[Tensor]]] = []
        sent_bytes = 0
        for owned in self._sums:
            for positions in self._by_type(owned.positions):
                flat = self._packed(gradients, positions)
                sent_bytes += owned.group.sent_bytes(flat)
                flights.append((owned, positions, flat, owned.group.all_reduce(flat)))
        for _, positions, flat, future in flights:
            future.wait()
            at = 0
            for index, position in enumerate(positions):
                shape = self._shapes[position]
                if float(flat[-len(positions) + index]):
                    gradients[position] = flat[at : at + shape.numel()].view(shape)
                at += shape.numel()
        return sent_bytes

    def _by_type(self, positions: Sequence[int]) -> list[list[int]]:
        found: dict[torch.dtype, list[int]] = {}
        for position in positions:
            found.setdefault(self.own[position].dtype, []).append(position)
        return list(found.values())

    def _packed(self, gradients: Gradients, positions: Sequence[int]) -> Tensor:
        """The gradients in a row, then for each whether there is one."""
        kind = self.own[positions[0]].dtype
        values = [
            torch.zeros(self._shapes[at].numel(), dtype=kind) if gradient is None else gradient.reshape(-1)
            for at, gradient in ((at, gradients[at]) for at in positions)
        ]
        there = torch.tensor([float(gradients[at] is not None) for at in positions], dtype=kind)
        return torch.cat([*values, there])


def _by_source(
    tensors: Iterable[tuple[Tensor, tuple[int, ...]]],
) -> dict[tuple[int, torch.dtype], list[Tensor]]:
    found: dict[tuple[int, torch.dtype], list[Tensor]] = {}
    for tensor, ranks in tensors:
        found.setdefault((ranks[0], tensor.dtype), []).append(tensor)
    return found


def _counts(ranks: Sequence[int]) -> int:
    """The worker whose gradient of a parameter counts in a norm over all."""
    return ranks[0]


@torch.no_grad()
def _share(group: Group, tensors: Sequence[Tensor], source: int) -> None:
    joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
    group.broadcast(joined, source)
    if group.rank != source:
        for tensor, part in zip(tensors, joined.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
