"""Memory for messages that are too long for a ring: blocks that a sender fills and receivers map.

A block begins with a page of numbers: how many bytes of the message are there, which use of the block this
is, and for each worker the last use that it has read. A block is used again when all its readers have read
it. All blocks of a worker together are bounded; who needs more waits until some are read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.comm.memory.segment import Handle, handle_of, make, map_segment, no_room
from echelon.errors import LaunchError

PAGE_BYTES = 4096
MOST_READERS = 500
LEAST_BYTES = 64 * 1024
MOST_BYTES = 16 * 1024 * 1024  # longer messages take several
_TOTAL_BYTES = 256 * 1024 * 1024
_THERE, _USE, _READ = 0, 1, 8  # places of the numbers


class Block:
    """A block in this process's memory, made here or mapped from its maker."""

    def __init__(self, memory: Tensor, handle: Handle, fd: int = -1) -> None:
        self._memory = memory
        self._numbers = memory[:PAGE_BYTES].view(torch.int64).numpy().data
        self.handle = handle
        self.address = memory.data_ptr() + PAGE_BYTES
        self.size_bytes = memory.numel() - PAGE_BYTES
        self.fd = fd
        self.use = 0
        self._readers: Sequence[int] = ()

    # The maker -----------------------------------------------------------------------------------

    def begin(self, readers: Sequence[int]) -> None:
        """Use it for these readers; nothing is there yet."""
        self.use += 1
        self._readers = readers
        self._numbers[_THERE] = 0
        self._numbers[_USE] = self.use

    def put(self, there_bytes: int) -> None:
        """So many bytes are there now. The caller has fenced."""
        self._numbers[_THERE] = there_bytes

    @property
    def is_free(self) -> bool:
        """Whether all readers have read it."""
        return all(self._numbers[_READ + reader] == self.use for reader in self._readers)

    # A reader ------------------------------------------------------------------------------------

    def there_bytes(self) -> int:
        """How many bytes can be read."""
        return int(self._numbers[_THERE])

    def current_use(self) -> int:
        """Which use this is."""
        return int(self._numbers[_USE])

    def is_read(self, reader: int, use: int) -> None:
        """Give it back."""
        self._numbers[_READ + reader] = use


class BlockPool:
    """The blocks that this worker has made."""

    def __init__(self) -> None:
        self._blocks: list[Block] = []
        self._total_bytes = 0

    def take(self, size_bytes: int) -> Block | None:
        """A free block, perhaps a smaller one; None if it must wait until one is read."""
        wanted = min(MOST_BYTES, max(LEAST_BYTES, 1 << (size_bytes - 1).bit_length()))
        free = [block for block in self._blocks if block.is_free]
        fitting = [block for block in free if block.size_bytes >= wanted]
        if fitting:
            return min(fitting, key=lambda block: block.size_bytes)
        if self._total_bytes + wanted <= _TOTAL_BYTES:
            try:
                return self._new(wanted)
            except LaunchError:
                if not self._blocks:
                    raise
        return max(free, key=lambda block: block.size_bytes, default=None)

    def close(self) -> None:
        """Forget all blocks."""
        while self._blocks:
            os.close(self._blocks.pop().fd)

    def _new(self, size_bytes: int) -> Block:
        length = size_bytes + PAGE_BYTES
        try:
            fd = make(length)
        except OSError as error:
            raise no_room(length, error) from error
        try:
            handle = handle_of(fd)
            block = Block(map_segment(os.getpid(), handle, length), handle, fd)
        except (OSError, RuntimeError) as error:
            os.close(fd)
            raise no_room(length, error) from error
        self._blocks.append(block)
        self._total_bytes += size_bytes
        return block


class MappedBlocks:
    """The blocks of other workers that this one has mapped."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._known: dict[tuple[int, Handle], Block] = {}

    def find(self, maker: int, handle: Handle, size_bytes: int) -> Block:
        """A block of that worker."""
        key = (maker, handle)
        if key not in self._known:
            self._known[key] = Block(
                map_segment(self._pids[maker], handle, size_bytes + PAGE_BYTES), handle
            )
        return self._known[key]
