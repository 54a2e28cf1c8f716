"""Buffers in the memory that a group reduces fastest, for tensors that are elsewhere.

torch's gradients and buckets are in memory of its own. Copying a large one into a buffer that the workers
of a machine share, and the sum back, takes less time than any other way. Scripts reduce tensors of the same
few sizes again and again, so buffers are kept.

All members make and drop the same buffers in the same order, because they carry out the same operations in
the same order, one at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.comm.group import Group

_LEAST_BYTES = 128 << 10  # below, the group's other ways are as fast
_MOST_BYTES = 64 << 20
_ALL_BYTES = 256 << 20


class Staging:
    """The buffers of one group, the one that was used last at the end."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._useful = group.own_transport and group.machines < group.size
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def takes(self, length: int, dtype: torch.dtype) -> bool:
        """Whether a tensor of so many elements is worth copying; the same on all members."""
        return self._useful and _LEAST_BYTES <= length * dtype.itemsize <= _MOST_BYTES

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer of that size, from before or new."""
        found = self._buffers.pop((length, dtype), None)
        if found is None:
            self._make_room(length * dtype.itemsize)
            found = self._group.buffer(length, dtype, torch.device("cpu"))
        self._buffers[length, dtype] = found
        return found

    def _make_room(self, size_bytes: int) -> None:
        """Drop those that were not used for longest."""
        held = sum(length * dtype.itemsize for length, dtype in self._buffers)
        for key in list(self._buffers):
            if held + size_bytes <= _ALL_BYTES:
                return
            held -= key[0] * key[1].itemsize
            self._group.release(self._buffers.pop(key))
