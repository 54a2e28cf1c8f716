"""The memory that a worker and a server of one machine share for a shard: a push, and the weights.

The worker writes its push there and says PushDone; the server applies it from there. The server writes the
weights that the worker gets there, and the worker installs them from there. So no gradient and no weight is
sent.

    page      the secret (mail.py), and how many pushes the server has done with
    push      the shard's elements
    weights   the shard's elements

The worker begins its next push when the server is done with the last one. The server writes weights only in
answer to the worker, which then waits for them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PAGE_BYTES = 4096
_DONE = 8  # the place of the number, in a cache line of its own


class SharedShard:
    """One shard's memory, on either side."""

    def __init__(self, memory: Tensor, length: int, dtype: torch.dtype) -> None:
        half = _half_bytes(length, dtype)
        size_bytes = length * dtype.itemsize
        self._numbers = memory[:_PAGE_BYTES].view(torch.int64).numpy().data
        self.push = memory[_PAGE_BYTES : _PAGE_BYTES + size_bytes].view(dtype)
        self.weights = memory[_PAGE_BYTES + half : _PAGE_BYTES + half + size_bytes].view(dtype)
        self._pushes = 0  # by the worker

    @staticmethod
    def size_bytes(length: int, dtype: torch.dtype) -> int:
        """The memory for a shard of so many elements."""
        return _PAGE_BYTES + 2 * _half_bytes(length, dtype)

    # The worker ----------------------------------------------------------------------------------

    def pushed(self) -> None:
        """The worker has told the server of a push."""
        self._pushes += 1

    @property
    def is_free(self) -> bool:
        """Whether the server is done with all pushes, so that the worker may write the next."""
        return bool(self._numbers[_DONE] == self._pushes)

    # The server ----------------------------------------------------------------------------------

    def done(self) -> None:
        """The server needs the push no more."""
        self._numbers[_DONE] += 1


def _half_bytes(length: int, dtype: torch.dtype) -> int:
    return -(-length * dtype.itemsize // _PAGE_BYTES) * _PAGE_BYTES
