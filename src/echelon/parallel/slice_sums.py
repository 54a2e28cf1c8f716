"""How are gradients summed so that each worker gets the sums of its own slices? In buckets.

Parameters of one type travel together, blocks by worker: its slices, and for each parameter whether this
worker has a gradient at all. A parameter without a gradient on every worker gets none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group, blocks
from echelon.parallel.slices import buckets

if TYPE_CHECKING:
    from echelon.parallel.shards import ShardedParameter

_MOST_ELEMENTS = 9 << 17  # that travel together: 2**20 and some small ones


@dataclass(frozen=True, slots=True, eq=False)
class SumsUnderWay:
    """A bucket whose sums have begun."""

    members: Sequence[ShardedParameter]
    future: Future[Tensor]


class SliceSums:
    """Sums over the workers that divide parameters, and then over `across`, those with the same slices.

    `sent_bytes` counts what this worker has sent.
    """

    def __init__(self, group: Group, across: Group | None) -> None:
        self._group = group
        self._across = across
        self.sent_bytes = 0

    def begin(
        self, members: Sequence[ShardedParameter], gradients: Sequence[Tensor | None], weight: float
    ) -> SumsUnderWay:
        """Begin to sum a bucket's gradients, times `weight`."""
        lengths = [
            sum(one.edges[worker][1] - one.edges[worker][0] for one in members) + len(members)
            for worker in range(self._group.size)
        ]
        first = members[0]
        flat = torch.zeros(sum(lengths), dtype=first.parameter.dtype, device=first.mine.device)
        for worker, block in enumerate(blocks(flat, lengths)):
            at = 0
            for index, (one, grad) in enumerate(zip(members, gradients, strict=True)):
                begin, end = one.edges[worker]
                if grad is not None:
                    torch.mul(grad.reshape(-1)[begin:end], weight, out=block[at : at + end - begin])
                    block[len(block) - len(members) + index] = 1
                at += end - begin
        size_bytes = flat.numel() * flat.element_size()
        self.sent_bytes += size_bytes * (self._group.size - 1) // self._group.size
        return SumsUnderWay(members, self._group.reduce_scatter(flat, lengths))

    def land(self, under_way: SumsUnderWay) -> None:
        """Add the sums to what the slices have kept."""
        members = under_way.members
        block = under_way.future.wait().clone()
        if self._across is not None:
            self.sent_bytes += self._across.sent_bytes(block)
            self._across.all_reduce(block).wait()
        at, there = 0, block[len(block) - len(members) :].tolist()
        for one, has in zip(members, there, strict=True):
            length = one.mine.numel()
            if has:
                fresh = block[at : at + length]
                one.kept = fresh if one.kept is None else one.kept.add_(fresh)
            at += length


def packed(members: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    """Parameters of one type that travel together."""
    found: list[list[ShardedParameter]] = []
    for kind in dict.fromkeys(one.parameter.dtype for one in members):
        alike = [one for one in members if one.parameter.dtype == kind]
        found += [
            [alike[at] for at in group] for group in buckets([one.length for one in alike], _MOST_ELEMENTS)
        ]
    return found
