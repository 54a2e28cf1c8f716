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

from echelon.comm import blame
from echelon.comm.collective import pieces
from echelon.comm.group import Op, Timing
from echelon.comm.segment import Gather, share
from echelon.errors import EchelonError

PIECE_BYTES = 256 * 1024
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


class Team:
    """The workers of one machine. `gather` gives everybody what each one said; `check` raises if one of
    them is gone.
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
        self._fence = threading.Lock()
        self._buffers: dict[int, list[Tensor]] = {}
        (board,) = share(2 * self.size * _LINE * 8, rank, pids, [0], gather)
        self._board = board.view(torch.int64).numpy().data
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

    def begin(self, tensor: Tensor, op: Op) -> tuple[int, Timing]:
        """Say that this worker's buffer is filled; returns the turn for `finish`, and how it goes."""
        self._turn += 1
        now = time.perf_counter()
        timing = Timing(begun=now, sent=now)
        self._open.append(_Reduction(self._turn, self._buffers[tensor.data_ptr()], op, timing))
        self._tell(0, self._turn)
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

    def has_finished(self, turn: int) -> bool:
        """Whether `finish` would return at once."""
        return not self._open or self._open[0].turn > turn

    def _reduce(self, reduction: _Reduction, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        turn, buffers = reduction.turn, reduction.buffers
        self._await(0, turn, deadline, deadline_s)
        start, stop = pieces(0, buffers[0].numel(), self.size)[self.rank]
        begun = time.perf_counter()
        for low, high in _cache_sized(start, stop, buffers[0].element_size()):
            _sum_piece(buffers, low, high, reduction.op)
        reduction.timing.adding_s = time.perf_counter() - begun
        self._tell(1, turn)
        self._await(1, turn, deadline, deadline_s)
        reduction.timing.ended = time.perf_counter()

    def _tell(self, row: int, turn: int) -> None:
        with self._fence:  # what was written before must be seen before the number is
            pass
        with self._fence:
            self._board[(row * self.size + self.rank) * _LINE] = turn

    def _await(self, row: int, turn: int, deadline: float, deadline_s: float) -> None:
        """Wait for everybody's number, and leave the core to those who have something to do meanwhile.

        Naps are a small part of what has been waited, so they neither cost nor delay much.
        """
        begun = time.perf_counter()
        for rank in range(self.size):
            at = (row * self.size + rank) * _LINE
            while self._board[at] < turn:
                waited = time.perf_counter() - begun
                if waited > _SPIN_S:
                    self._look(row, turn, deadline, deadline_s)
                    time.sleep(min(max(waited / 32, _SHORTEST_NAP_S), _LONGEST_NAP_S))
                else:
                    os.sched_yield()
        with self._fence:
            pass

    def _look(self, row: int, turn: int, deadline: float, deadline_s: float) -> None:
        """Raise if those who are behind will not come; who has come may have gone since."""
        try:
            self._check()
        except EchelonError:
            if self._behind(row, turn):
                raise
        if time.monotonic() > deadline:
            behind = self._behind(row, turn)
            if behind:
                raise blame.late(self._names, behind, deadline_s, self._names[self.rank])

    def _behind(self, row: int, turn: int) -> list[int]:
        return [r for r in range(self.size) if self._board[(row * self.size + r) * _LINE] < turn]


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
