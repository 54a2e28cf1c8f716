"""The operations that go through slots: what each worker writes, sums and reads.

Tensors are copied by their addresses: a view as a numpy array would keep a tensor's storage from being
resized. Sums are computed in rank order, half precision in float32, by the same operations on all workers;
so all end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, memmove, sizeof, string_at
from functools import lru_cache
from itertools import accumulate

import torch
import xxhash
from torch import Tensor

from echelon.comm.group import Op
from echelon.comm.memory.shm import COMBINE
from echelon.comm.memory.slots import KINDS, SLOT_BYTES, Head, SlotTeam, SlotWork
from echelon.comm.schedule.collective import pieces

_HALF = (torch.float16, torch.bfloat16)


@lru_cache(maxsize=4096)
def _facts(*about: object) -> int:
    """A number that is equal on all workers that take part in the same operation."""
    return xxhash.xxh3_64_intdigest(repr(about).encode()) >> 1


def _head(kind: str, length_bytes: int, call: int, *about: object) -> Head:
    return Head(KINDS.index(kind), length_bytes, _facts(kind, length_bytes, *about), call)


def is_small(length_bytes: int) -> bool:
    """Whether so many bytes of each worker fit small slots."""
    return length_bytes <= SLOT_BYTES


def _combine(parts: Sequence[Tensor], op: Op, out: Tensor) -> None:
    """Combine in the given order; `out` may be the first part."""
    combine = COMBINE[op]
    if out.dtype in _HALF:
        total = parts[0].float()
        for part in parts[1:]:
            combine(total, part.float(), out=total)
        out.copy_(total)
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


class Barrier(SlotWork):
    """Nothing is copied."""

    def __init__(self, call: int = 0) -> None:
        super().__init__(_head("barrier", 0, call))

    def write(self, at: int, slot: int) -> None:
        """Nothing."""

    def read(self, at: int, slot: int) -> None:
        """Nothing."""


class SmallReduce(SlotWork):
    """A sum that every worker computes by itself."""

    def __init__(self, team: SlotTeam, flat: Tensor, op: Op, call: int = 0) -> None:
        self._bytes = flat.numel() * flat.element_size()
        super().__init__(_head("all_reduce", self._bytes, call, op, flat.dtype))
        self._team = team
        self._flat = flat
        self._op = op

    def write(self, at: int, slot: int) -> None:
        """All of it."""
        memmove(self._team.address(self._team.rank, slot, small=True), self._flat.data_ptr(), self._bytes)

    def read(self, at: int, slot: int) -> None:
        """Sum all slots."""
        flat = self._flat
        if self._bytes:
            _combine(self._team.views(slot, flat.numel(), flat.dtype, small=True), self._op, flat)


class LargeReduce(SlotWork):
    """A sum in pieces: each worker sums its share of a piece in its slot; all copy all shares.

    A worker's slot has the shares that others sum. Its own one it adds from where it is, and the place in
    its slot gets the sum.
    """

    small = False
    sums = True

    def __init__(self, team: SlotTeam, flat: Tensor, op: Op, call: int = 0) -> None:
        self._item = flat.element_size()
        self._bytes = flat.numel() * self._item
        super().__init__(
            _head("all_reduce", self._bytes, call, op, flat.dtype), -(-self._bytes // team.piece_bytes)
        )
        self._team = team
        self._flat = flat
        self._op = op

    def _range(self, at: int) -> tuple[int, int]:
        """Where a piece begins and how many elements it has."""
        step = self._team.piece_bytes // self._item
        return at * step, min(step, self._flat.numel() - at * step)

    def _copy(self, at: int, slot: int, *, sums: bool) -> None:
        """Copy the sums of all workers' shares out of their slots, or the others' shares to this one's."""
        start, count = self._range(at)
        team, item = self._team, self._item
        flat = self._flat.data_ptr() + start * item
        for rank, (low, high) in enumerate(pieces(0, count, team.size)):
            if high > low and (sums or rank != team.rank):
                there = team.address(rank if sums else team.rank, slot, small=False) + low * item
                here = flat + low * item
                memmove(here if sums else there, there if sums else here, (high - low) * item)

    def write(self, at: int, slot: int) -> None:
        """What the others sum."""
        self._copy(at, slot, sums=False)

    def sum(self, at: int, slot: int) -> None:
        """This worker's share of it."""
        start, count = self._range(at)
        team = self._team
        low, high = pieces(0, count, team.size)[team.rank]
        if high > low:
            views = team.views(slot, count, self._flat.dtype, small=False)
            parts = [view[low:high] for view in views]
            out, parts[team.rank] = parts[team.rank], self._flat[start + low : start + high]
            _combine(parts, self._op, out)

    def read(self, at: int, slot: int) -> None:
        """The sums of all shares."""
        self._copy(at, slot, sums=True)


class Gather(SlotWork):
    """Blocks of any length, which lie behind each other in a buffer; each worker has filled its own."""

    def __init__(self, team: SlotTeam, buffer: Tensor, lengths: Sequence[int], call: int = 0) -> None:
        longest = max(lengths)
        self.small = is_small(longest)
        self._step = SLOT_BYTES if self.small else team.piece_bytes
        super().__init__(
            _head("all_gather", longest, call, tuple(lengths)), max(1, -(-longest // self._step))
        )
        self._team = team
        self._buffer = buffer
        self._blocks = list(zip(accumulate(lengths, initial=0), lengths, strict=False))

    def _range(self, rank: int, at: int) -> tuple[int, int]:
        start, length = self._blocks[rank]
        offset = at * self._step
        return self._buffer.data_ptr() + start + offset, min(self._step, length - offset)

    def write(self, at: int, slot: int) -> None:
        """This worker's block."""
        team = self._team
        address, length = self._range(team.rank, at)
        if length > 0:
            memmove(team.address(team.rank, slot, small=self.small), address, length)

    def read(self, at: int, slot: int) -> None:
        """The other blocks."""
        team = self._team
        for rank in range(team.size):
            if rank != team.rank:
                address, length = self._range(rank, at)
                if length > 0:
                    memmove(address, team.address(rank, slot, small=self.small), length)


class Broadcasting(SlotWork):
    """One worker's bytes for all; they are all ready for it, so that different calls are noticed."""

    def __init__(self, team: SlotTeam, flat: Tensor, source: int, call: int = 0) -> None:
        self._bytes = flat.numel()
        self.small = is_small(self._bytes)
        self._step = SLOT_BYTES if self.small else team.piece_bytes
        super().__init__(
            _head("broadcast", self._bytes, call, source), max(1, -(-self._bytes // self._step))
        )
        self._team = team
        self._flat = flat
        self._source = source

    def _range(self, at: int) -> tuple[int, int]:
        start = at * self._step
        return self._flat.data_ptr() + start, min(self._step, self._bytes - start)

    def write(self, at: int, slot: int) -> None:
        """The source's piece."""
        if self._team.rank == self._source:
            address, length = self._range(at)
            memmove(self._team.address(self._source, slot, small=self.small), address, length)

    def read(self, at: int, slot: int) -> None:
        """The source's piece."""
        if self._team.rank != self._source:
            address, length = self._range(at)
            memmove(address, self._team.address(self._source, slot, small=self.small), length)


class Scatter(SlotWork):
    """A sum of which each worker gets its block. A piece has a part of every block, so all sum at once."""

    def __init__(self, team: SlotTeam, flat: Tensor, lengths: Sequence[int], op: Op, call: int = 0) -> None:
        item = flat.element_size()
        total = flat.numel() * item
        self.small = is_small(total)
        longest = max(lengths)
        self._step = longest if self.small else team.piece_bytes // item // team.size  # of each block
        count = max(1, -(-longest // max(1, self._step)))
        super().__init__(_head("reduce_scatter", total, call, op, flat.dtype, tuple(lengths)), count)
        self._team = team
        self._flat = flat
        self._op = op
        self._item = item
        self._blocks = list(zip(accumulate(lengths, initial=0), lengths, strict=False))

    def _parts(self, at: int) -> list[tuple[int, int, int]]:
        """Of each block: its part of this piece in the tensor, and where it lies in a slot; in elements."""
        found, place = [], 0
        for start, length in self._blocks:
            offset = at * self._step
            taken = max(0, min(self._step, length - offset))
            found.append((start + offset, taken, place))
            place += taken
        return found

    def write(self, at: int, slot: int) -> None:
        """The parts of all other workers' blocks, and of this one's."""
        base = self._team.address(self._team.rank, slot, small=self.small)
        address = self._flat.data_ptr()
        for start, count, place in self._parts(at):
            if count:
                memmove(base + place * self._item, address + start * self._item, count * self._item)

    def read(self, at: int, slot: int) -> None:
        """Sum this worker's part."""
        parts = self._parts(at)
        start, count, place = parts[self._team.rank]
        if count:
            whole = sum(part[1] for part in parts)
            views = self._team.views(slot, whole, self._flat.dtype, small=self.small)
            mine = [view[place : place + count] for view in views]
            _combine(mine, self._op, self._flat[start : start + count])


class GatherAny(SlotWork):
    """Tensors whose shapes only their owners know: all shapes, and all tensors if they fit small slots.

    shapes  of all workers' tensors
    inline  whether `found` has their bytes
    """

    def __init__(self, team: SlotTeam, own: Tensor, call: int = 0) -> None:
        self._bytes = own.numel() * own.element_size()
        facts = _facts("gather any", own.dtype, own.dim())
        super().__init__(Head(KINDS.index("all_gather"), self._bytes, facts, call))
        self._team = team
        self._own = own
        self._dims = own.dim()
        self._room = SLOT_BYTES - 8 * (self._dims + 1)
        self.shapes: list[tuple[int, ...]] = []
        self.found: list[bytearray] = []
        self.inline = False

    def write(self, at: int, slot: int) -> None:
        """The length, the shape, and the tensor if it fits."""
        numbers = (c_int64 * (self._dims + 1))(self._bytes, *self._own.shape)
        address = self._team.address(self._team.rank, slot, small=True)
        memmove(address, numbers, sizeof(numbers))
        if 0 < self._bytes <= self._room:
            memmove(address + sizeof(numbers), self._own.data_ptr(), self._bytes)

    def read(self, at: int, slot: int) -> None:
        """All shapes; all tensors if they are there."""
        kind, lengths = c_int64 * (self._dims + 1), []
        places = [self._team.address(rank, slot, small=True) for rank in range(self._team.size)]
        for address in places:
            numbers = kind.from_address(address)
            lengths.append(numbers[0])
            self.shapes.append(tuple(numbers[1:]))
        self.inline = max(lengths) <= self._room
        if self.inline:
            skipped = sizeof(kind)
            self.found = [
                bytearray(string_at(address + skipped, length))
                for address, length in zip(places, lengths, strict=True)
            ]
