"""Workers of one machine reduce in shared memory: nothing is sent, and nothing is copied but the sum.

Every worker's buffer lies in shared memory and is mapped by all. Each worker sums its own slice over
all buffers, piece by piece in the cache, and writes the sum to all of them; so everybody ends with
the same bits, in its own buffer. Two numbers per worker say how far it is: `ready` (its buffer holds
its gradients) and `done` (its slice is summed).

A segment's name is removed as soon as all have mapped it, so that nothing remains however a worker ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from echelon.comm.collective import pieces
from echelon.comm.group import Op
from echelon.errors import LaunchError

FOLDER = Path("/dev/shm")
PIECE_BYTES = 256 * 1024
_LINE = 8  # int64 numbers per cache line: workers' numbers must not share one
_SPIN_S = 200e-6
_NAP_S = 50e-6
_LONG_NAP_S = 500e-6


class Segment:
    """A piece of shared memory. `create` reserves it, so that a full file system is noticed at once."""

    def __init__(self, path: Path, size_bytes: int, *, create: bool) -> None:
        self.path = path
        size = max(size_bytes, mmap.PAGESIZE)
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.posix_fallocate(fd, 0, size)
            self.memory = mmap.mmap(fd, size)
        except OSError as error:
            if create:
                self.unlink()
            raise LaunchError(
                f"no room for {size} bytes of shared memory: {error.strerror}",
                where=str(FOLDER),
                fix="make room there, or use --transport tcp",
            ) from error
        finally:
            os.close(fd)

    def unlink(self) -> None:
        """Remove the name; the memory lives on while it is mapped."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class Team:
    """The workers of one machine. `meet` returns when all of them have called it."""

    def __init__(
        self, stem: str, rank: int, size: int, *, meet: Callable[[], None], check: Callable[[], None]
    ) -> None:
        self.rank = rank
        self.size = size
        self._stem = stem
        self._meet = meet
        self._check = check
        self._made = 0
        self._crowded = size > len(os.sched_getaffinity(0))
        self._fence = threading.Lock()
        self._buffers: dict[int, list[Tensor]] = {}
        board = self._share(2 * size * _LINE * 8)[0]
        self._board = memoryview(board.memory).cast("q")
        self._turn = 0

    def _share(self, size_bytes: int, *, each: bool = False) -> list[Segment]:
        """Segments by rank: one that the first worker makes, or one of each worker. All call together."""
        self._made += 1
        paths = [FOLDER / f"{self._stem}-{self._made}-{rank}" for rank in range(self.size if each else 1)]
        mine = self.rank if each else 0
        made: Segment | None = None
        failure: LaunchError | None = None
        found: list[Segment] = []
        try:
            if each or self.rank == 0:
                try:
                    made = Segment(paths[mine], size_bytes, create=True)
                except LaunchError as error:
                    failure = error
            self._meet()
            if failure is None:
                found = [
                    made if made is not None and rank == mine else Segment(path, size_bytes, create=False)
                    for rank, path in enumerate(paths)
                ]
            self._meet()
        except FileNotFoundError as error:  # its maker failed, and says why
            failure = LaunchError("another worker could not make shared memory", where=str(FOLDER))
            failure.__cause__ = error
            self._meet()
        finally:
            if made is not None:
                made.unlink()
        if failure is not None:
            raise failure
        return found

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer in shared memory. All workers ask for the same ones in the same order."""
        item = torch.empty(0, dtype=dtype).element_size()
        segments = self._share(length * item, each=True)
        tensors = [torch.frombuffer(s.memory, dtype=dtype, count=length) for s in segments]
        mine = tensors[self.rank].zero_()
        self._buffers[mine.data_ptr()] = tensors
        return mine

    def release(self, tensor: Tensor) -> None:
        """Forget a buffer."""
        self._buffers.pop(tensor.data_ptr(), None)

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is a whole buffer of this team."""
        known = self._buffers.get(tensor.data_ptr())
        return known is not None and known[self.rank].numel() == tensor.numel()

    def ready(self) -> int:
        """Say that this worker's buffer is filled; returns the turn that `reduce` wants."""
        self._turn += 1
        self._tell(0, self._turn)
        return self._turn

    def reduce(self, tensor: Tensor, op: Op, turn: int, deadline: float) -> None:
        """Sum a buffer over the team, in place on every worker."""
        buffers = self._buffers[tensor.data_ptr()]
        self._await(0, turn, deadline)
        start, stop = pieces(0, tensor.numel(), self.size)[self.rank]
        for low, high in _cache_sized(start, stop, tensor.element_size()):
            _sum_piece(buffers, low, high, op)
        self._tell(1, turn)
        self._await(1, turn, deadline)

    def _tell(self, row: int, turn: int) -> None:
        with self._fence:  # what was written before must be seen before the number is
            pass
        with self._fence:
            self._board[(row * self.size + self.rank) * _LINE] = turn

    def _await(self, row: int, turn: int, deadline: float) -> None:
        begun = time.perf_counter()
        for rank in range(self.size):
            at = (row * self.size + rank) * _LINE
            while self._board[at] < turn:
                waited = time.perf_counter() - begun
                if waited > _SPIN_S:
                    self._check()
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"timed out waiting for local rank {rank}")
                    time.sleep(_NAP_S if waited < 0.02 else _LONG_NAP_S)
                elif self._crowded:
                    os.sched_yield()
        with self._fence:
            pass


def _cache_sized(start: int, stop: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE_BYTES // item_bytes)
    for low in range(start, stop, step):
        yield low, min(stop, low + step)


def _sum_piece(buffers: list[Tensor], low: int, high: int, op: Op) -> None:
    """Sum one piece in rank order, halves in float32, and write it everywhere."""
    first = buffers[0][low:high]
    half = first.dtype in (torch.float16, torch.bfloat16)
    total = first.float() if half else first
    for other in buffers[1:]:
        _COMBINE[op](total, other[low:high].float() if half else other[low:high], out=total)
    if half:
        first.copy_(total)
    for other in buffers[1:]:
        other[low:high].copy_(first)


_COMBINE: dict[Op, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
