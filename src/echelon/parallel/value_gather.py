"""How do all workers get the whole values of divided parameters? By a gather of their slices.

A large parameter is gathered in its own memory, where each worker's slice is a block; small ones travel
together in a buffer. A gather that has begun is landed later: meanwhile it is under way, and other
things can be computed. All workers begin the same gathers in the same order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group, blocks
from echelon.parallel.slices import buckets

if TYPE_CHECKING:
    from echelon.parallel.shards import ShardedParameter

_LARGE = 1 << 16  # elements: from here on a parameter travels alone
_MOST_ELEMENTS = 1 << 20  # of small ones that travel together


@dataclass(slots=True, eq=False)
class ValuesUnderWay:
    """A gather that has begun; `flat` is the buffer of small parameters, None for a large one."""

    members: list[ShardedParameter]
    flat: Tensor | None
    lengths: list[int]
    future: Future[Tensor] = field(default_factory=lambda: Future.completed(torch.empty(0)))


class ValueGather:
    """Gathers values over the workers that divide them. `told` gets the bytes that this one sends."""

    def __init__(self, group: Group, told: Callable[[int], None]) -> None:
        self._group = group
        self._told = told

    def begin(self, wanted: Sequence[ShardedParameter]) -> list[ValuesUnderWay]:
        """Begin to gather these parameters, whose whole memory is there."""
        return [self._begin(members) for members in together(wanted)]

    def _begin(self, members: list[ShardedParameter]) -> ValuesUnderWay:
        workers = range(self._group.size)
        lengths = [sum(one.edges[at][1] - one.edges[at][0] for one in members) for at in workers]
        first = members[0]
        alone = first if len(members) == 1 else None
        flat = _same_memory(first.whole) if alone else torch.empty(sum(lengths), dtype=first.mine.dtype)
        mine = blocks(flat, lengths)[self._group.rank]
        if alone is None:
            torch.cat([one.mine for one in members], out=mine)
        elif mine.numel() and mine.data_ptr() != alone.mine.data_ptr():
            mine.copy_(alone.mine)
        self._told(flat.numel() * flat.element_size() * (len(lengths) - 1) // len(lengths))
        future = self._group.all_gather_unequal(flat, lengths)
        return ValuesUnderWay(members, None if alone else flat, lengths, future)

    def land(self, flight: ValuesUnderWay) -> None:
        """Wait for a gather; afterwards its members' whole memory has all values."""
        flight.future.wait()
        if flight.flat is None:
            return
        for worker, block in enumerate(blocks(flight.flat, flight.lengths)):
            at = 0
            for one in flight.members:
                begin, end = one.edges[worker]
                one.whole[begin:end] = block[at : at + end - begin]
                at += end - begin


def together(wanted: Sequence[ShardedParameter]) -> list[list[ShardedParameter]]:
    """Which parameters travel together: large ones alone, small ones of one type in order."""
    found: list[list[ShardedParameter]] = [[one] for one in wanted if one.length >= _LARGE]
    small = [one for one in wanted if one.length < _LARGE]
    for kind in dict.fromkeys(one.parameter.dtype for one in small):
        alike = [one for one in small if one.parameter.dtype == kind]
        groups = buckets([one.length for one in alike], _MOST_ELEMENTS)
        found += [[alike[at] for at in group] for group in groups]
    return found


def _same_memory(tensor: Tensor) -> Tensor:
    """Another tensor in the same memory, with a storage of its own.

    A transport may show it to numpy, and a storage that numpy has seen cannot give its memory back.
    Whoever calls this keeps the memory while the result is used.
    """
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes or tensor.device.type != "cpu":
        return tensor
    memory = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype)
