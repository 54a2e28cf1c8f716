"""Workers of one machine reduce in shared memory: nothing is sent, and nothing is copied but the sum.

Every worker's buffer lies in shared memory and is mapped by all. Each worker sums its own slice over
all buffers, piece by piece in the cache, and writes the sum to all of them; so everybody ends with
the same bits, in its own buffer. Two numbers per worker say how far it is: `ready` (its buffer holds
its gradients) and `done` (its slice is summed).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.comm.future import Timing
from echelon.comm.group import Op
from echelon.comm.memory.segment import Gather, share
from echelon.comm.schedule.collective import pieces
from echelon.comm.wire import blame
from echelon.errors import EchelonError

PIECE_BYTES = 256 * 1024  # until the machine's own is known, see cluster/probe.py
READY, DONE = 0, 1  # rows of the board
_LINE = 8  # int64 numbers per cache line: workers' numbers must not share one
_SPIN_S = 200e-6
_SHORTEST_NAP_S = 50e-6
_LONGEST_NAP_S = 1e-3


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction that this worker is ready for."""

    turn: int
    buffers: list[Tensor]
    op: Op
    timing: Timing


class Board:
    """How far each worker is, in memory that all see: numbers that only grow, a row for each question."""

    def __init__(self, rank: int, size: int, memory: Tensor) -> None:
        self._rank = rank
        self._size = size
        self._numbers = memory.view(torch.int64).numpy().data
        self._fence = threading.Lock()

    @staticmethod
    def size_bytes(size: int) -> int:
        """What a board for so many workers takes."""
        return 2 * size * _LINE * 8

    def tell(self, row: int, turn: int) -> None:
        """Say how far this worker is; whoever reads the number sees all that was written before."""
        with self._fence:  # what was written before must be seen before the number is
            pass
        with self._fence:
            self._numbers[(row * self._size + self._rank) * _LINE] = turn

    def has_reached(self, row: int, rank: int, turn: int) -> bool:
        """Whether a worker is that far."""
        return bool(self._numbers[(row * self._size + rank) * _LINE] >= turn)

    def behind(self, row: int, turn: int) -> list[int]:
        """Those who are not that far."""
        late = [rank for rank in range(self._size) if not self.has_reached(row, rank, turn)]
        with self._fence:  # what is read after this is no older than the numbers
            return late


class SharedMemoryTeam:
    """The workers of one machine: ranks are positions among them. `gather` gives everybody what each one
    said, see `share`; `check` raises if one of them is gone.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        pids: Sequence[int],
        *,
        gather: Gather,
        check: Callable[[], None],
    ) -> None:
        self.rank = rank
        self.size = len(names)
        self._names = names
        self._pids = pids
        self._gather = gather
        self._check = check
        self._buffers: dict[int, list[Tensor]] = {}
        (memory,) = share(Board.size_bytes(self.size), rank, pids, [0], gather)
        self.board = Board(rank, self.size, memory)
        self.piece_bytes = PIECE_BYTES
        self._turn = 0
        self._open: deque[_Reduction] = deque()
        self._working = threading.Lock()
        self._broken: Exception | None = None

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer in shared memory. All workers ask for the same ones in the same order."""
        size_bytes = length * torch.empty(0, dtype=dtype).element_size()
        segments = share(size_bytes, self.rank, self._pids, range(self.size), self._gather)
        tensors = [memory.view(dtype) for memory in segments]
        mine = tensors[self.rank]
        self._buffers[mine.data_ptr()] = tensors
        return mine

    def release(self, tensor: Tensor) -> None:
        """Forget a buffer."""
        self._buffers.pop(tensor.data_ptr(), None)

    def holds(self, tensor: Tensor) -> bool:
        """Whether this is a whole buffer of this team."""
        known = self._buffers.get(tensor.data_ptr())
        if known is None:
            return False
        mine = known[self.rank]
        return mine.numel() == tensor.numel() and mine.dtype == tensor.dtype

    def everybodys(self, tensor: Tensor) -> list[Tensor]:
        """All workers' buffers, of which this is one, by rank."""
        return self._buffers[tensor.data_ptr()]

    def begin(self, tensor: Tensor, op: Op) -> tuple[int, Timing]:
        """Say that this worker's buffer is filled; returns the turn for `finish`, and how it goes."""
        self._turn += 1
        now = time.perf_counter()
        timing = Timing(begun=now, sent=now)
        self._open.append(_Reduction(self._turn, self.everybodys(tensor), op, timing))
        self.board.tell(READY, self._turn)
        return self._turn, timing

    def finish(self, turn: int, deadline_s: float) -> None:
        """Sum over the team, in place on every worker, what was begun up to that turn.

        In the order of turns, whoever waits for which first: the numbers on the board only grow.
        """
        with self._working:
            while self._open and self._open[0].turn <= turn:
                if self._broken is not None:
                    raise self._broken
                try:
                    self._reduce(self._open[0], deadline_s)
                except Exception as error:
                    self._broken = error
                    raise
                self._open.popleft()

    def finish_all(self, deadline_s: float) -> None:
        """The same for all that was begun."""
        self.finish(self._turn, deadline_s)

    def has_finished(self, turn: int) -> bool:
        """Whether `finish` would return at once."""
        return not self._open or self._open[0].turn > turn

    def _reduce(self, reduction: _Reduction, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        turn, buffers = reduction.turn, reduction.buffers
        self._await(READY, turn, deadline, deadline_s)
        start, stop = pieces(0, buffers[0].numel(), self.size)[self.rank]
        begun = reduction.timing.begun = time.perf_counter()
        for low, high in self.cache_sized(start, stop, buffers[0].element_size()):
            _sum_piece(buffers, low, high, reduction.op)
        reduction.timing.adding_s = time.perf_counter() - begun
        self.board.tell(DONE, turn)
        self._await(DONE, turn, deadline, deadline_s)
        reduction.timing.ended = time.perf_counter()

    def cache_sized(self, start: int, stop: int, item_bytes: int) -> Iterator[tuple[int, int]]:
        """A range in pieces that stay in the cache while they are summed."""
        step = max(1, self.piece_bytes // item_bytes)
        for low in range(start, stop, step):
            yield low, min(stop, low + step)

    def _await(self, row: int, turn: int, deadline: float, deadline_s: float) -> None:
        """Wait for everybody's number, and leave the core to those who have something to do meanwhile.

        Naps are a small part of what has been waited, so they neither cost nor delay much.
        """
        begun = time.perf_counter()
        while self.board.behind(row, turn):
            waited = time.perf_counter() - begun
            if waited > _SPIN_S:
                self._look(row, turn, deadline, deadline_s)
                time.sleep(nap_s(waited))
            else:
                os.sched_yield()

    def _look(self, row: int, turn: int, deadline: float, deadline_s: float) -> None:
        """Raise if those who are behind will not come; who has come may have gone since."""
        try:
            self._check()
        except EchelonError:
            if self.board.behind(row, turn):
                raise
        if time.monotonic() > deadline:
            behind = self.board.behind(row, turn)
            if behind:
                raise blame.late(self._names, behind, deadline_s, self._names[self.rank])


def nap_s(waited_s: float) -> float:
    """How long to sleep after having waited so long."""
    return min(max(waited_s / 32, _SHORTEST_NAP_S), _LONGEST_NAP_S)


def sum_into(position: int, buffers: list[Tensor], low: int, high: int, op: Op) -> None:
    """Sum one piece in rank order, halves in float32, and write it to one buffer only."""
    half = buffers[0].dtype in (torch.float16, torch.bfloat16)
    parts = [buffer[low:high].float() if half else buffer[low:high] for buffer in buffers]
    if len(parts) > 1:
        total = _COMBINE[op](parts[0], parts[1])
        for other in parts[2:]:
            _COMBINE[op](total, other, out=total)
        buffers[position][low:high].copy_(total)


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
