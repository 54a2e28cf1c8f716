"""Reduction among the workers of one machine, in shared memory: only the sum is copied.

Every worker's buffer lies in shared memory and is mapped by all. Each worker sums its own slice over
all buffers, piece by piece in the cache, and writes the sum to all of them. So all workers end with the
same bits, each in its own buffer. Each worker publishes two numbers on a board: the last reduction for
which it is `ready` (its buffer is filled) and the last that is `done` (its slice is summed).
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

from echelon.comm.future import LONG_S, Timing
from echelon.comm.group import Op
from echelon.comm.memory.segment import Gather, share
from echelon.comm.schedule.collective import pieces
from echelon.comm.wire import blame
from echelon.comm.wire.frames import CHANNEL_BITS
from echelon.comm.wire.watch import MEMORY_CHANNELS, Watch
from echelon.errors import EchelonError

PIECE_BYTES = 256 * 1024  # until the machine's best is measured, see cluster/probe.py
READY, DONE = 0, 1  # rows of the board
_LINE = 8  # int64 numbers per cache line; workers' numbers must not share one
_SPIN_S = 200e-6
_SHORTEST_SLEEP_S = 50e-6
_LONGEST_SLEEP_S = 1e-3


@dataclass(slots=True)
class _Reduction:
    """A reduction for which this worker is ready. `summed`: its slice of it is done."""

    number: int
    buffers: list[Tensor]
    op: Op
    timing: Timing
    summed: bool = False


class Board:
    """The workers' progress in shared memory: rows of numbers, such as READY and DONE, that only grow."""

    def __init__(self, rank: int, size: int, memory: Tensor, *, rows: int = 2) -> None:
        self._rank = rank
        self._size = size
        self._rows = [range(row * size * _LINE, (row + 1) * size * _LINE, _LINE) for row in range(rows)]
        self._numbers = memory.view(torch.int64).numpy().data
        self._fence = threading.Lock()

    @staticmethod
    def size_bytes(size: int, rows: int = 2) -> int:
        """The memory for a board of so many workers."""
        return rows * size * _LINE * 8

    def publish(self, row: int, number: int) -> None:
        """Publish this worker's number; a reader of the number sees all that was written before it."""
        with self._fence:  # earlier writes become visible before the number
            pass
        with self._fence:
            self._numbers[(row * self._size + self._rank) * _LINE] = number

    def has_reached(self, row: int, rank: int, number: int) -> bool:
        """Whether a worker has published that number."""
        return bool(self._numbers[(row * self._size + rank) * _LINE] >= number)

    def behind(self, row: int, number: int) -> list[int]:
        """The workers that have not published that number."""
        numbers = self._numbers
        late = [rank for rank, at in enumerate(self._rows[row]) if numbers[at] < number]
        with self._fence:  # later reads are no older than the numbers
            return late


class MemoryWait:
    """A thread that is blocked until all workers have published a number."""

    ended = False

    def __init__(self, tag: int, board: Board, row: int, number: int) -> None:
        self.tag = tag
        self.thread = threading.get_ident()
        self._board = board
        self._row = row
        self._number = number

    def awaited(self) -> set[int]:
        """The workers that have not."""
        return set(self._board.behind(self._row, self._number))

    def requires(self, rank: int) -> bool:
        """All workers: the result is their sum."""
        return True

    def lacks(self, rank: int) -> bool:
        """There are no messages in memory."""
        return False


class SharedMemoryTeam:
    """The workers of one machine; ranks are positions among them. `gather` exchanges handles (see `share`);
    `check` raises if a worker is gone; `meanwhile` is called while this worker waits for the others.
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
        self._number = 0
        self._open: deque[_Reduction] = deque()
        self._working = threading.Lock()
        self._broken: Exception | None = None
        self.meanwhile: Callable[[], None] = _nothing
        self._watch: Watch | None = None
        self._first_tag = 0

    def report_to(self, watch: Watch, channel: int) -> None:
        """Report long waits, under a channel of its own. The team has all workers: positions are ranks."""
        self._watch = watch
        self._first_tag = (MEMORY_CHANNELS + channel) << CHANNEL_BITS
        watch.memory[channel] = self.has_begun

    def buffer(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer in shared memory. All workers call this in the same order."""
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

    def buffers_of(self, tensor: Tensor) -> list[Tensor]:
        """The buffers of all workers for this one, by rank."""
        return self._buffers[tensor.data_ptr()]

    def has_begun(self, number: int) -> bool:
        """Whether this worker has published that its buffer is filled."""
        return number <= self._number

    def others_shares(self, tensor: Tensor) -> list[slice]:
        """The parts of a buffer that the other workers sum."""
        found = pieces(0, tensor.numel(), self.size)
        return [slice(0, found[self.rank][0]), slice(found[self.rank][1], tensor.numel())]

    def begin(self, tensor: Tensor, op: Op, own: Tensor | None = None) -> tuple[int, Timing]:
        """Publish that this worker's buffer is filled; returns the reduction's number, and its timing.

        With `own`, this worker's slice is in that tensor, and gets the sum there; its buffer has the rest.
        """
        if self._watch is not None and self._watch.beginner != threading.get_ident():
            self._watch.begins(threading.get_ident())
        self._number += 1
        now = time.perf_counter()
        timing = Timing(begun=now, sent=now)
        buffers = self.buffers_of(tensor)
        if own is not None:
            buffers = [*buffers[: self.rank], own, *buffers[self.rank + 1 :]]
        self._open.append(_Reduction(self._number, buffers, op, timing))
        self.board.publish(READY, self._number)
        return self._number, timing

    def finish(self, number: int, deadline_s: float) -> None:
        """Sum over the team, in place on every worker, all reductions up to that number.

        Always in the order of numbers, because those on the board only grow.
        """
        with self._working:
            while self._open and self._open[0].number <= number:
                if self._broken is not None:
                    raise self._broken
                try:
                    self._reduce(self._open[0], deadline_s)
                except Exception as error:
                    self._broken = error
                    raise
                self._open.popleft()

    def finish_all(self, deadline_s: float) -> None:
        """All reductions that have begun."""
        self.finish(self._number, deadline_s)

    def advance(self) -> None:
        """Sum this worker's slice of all reductions for which everybody is ready; never waits.

        A worker that waits for one team calls it on the others. Otherwise two workers that wait for
        different teams would wait for each other.
        """
        if not self._open or not self._working.acquire(blocking=False):
            return
        try:
            for reduction in tuple(self._open):
                if self._broken is not None or self.board.behind(READY, reduction.number):
                    return
                self._sum(reduction)
        finally:
            self._working.release()

    def has_finished(self, number: int) -> bool:
        """Whether `finish` would return at once."""
        return not self._open or self._open[0].number > number

    def _reduce(self, reduction: _Reduction, deadline_s: float) -> None:
        deadline = time.monotonic() + deadline_s
        self._await(READY, reduction.number, deadline, deadline_s)
        self._sum(reduction)
        self._await(DONE, reduction.number, deadline, deadline_s)
        reduction.timing.ended = time.perf_counter()

    def _sum(self, reduction: _Reduction) -> None:
        """This worker's slice, once everybody is ready."""
        if reduction.summed:
            return
        buffers = reduction.buffers
        start, stop = pieces(0, buffers[0].numel(), self.size)[self.rank]
        begun = reduction.timing.begun = time.perf_counter()
        for low, high in self.cache_sized(start, stop, buffers[0].element_size()):
            _sum_piece(buffers, low, high, reduction.op)
        reduction.timing.adding_s = time.perf_counter() - begun
        reduction.summed = True
        self.board.publish(DONE, reduction.number)

    def cache_sized(self, start: int, stop: int, item_bytes: int) -> Iterator[tuple[int, int]]:
        """A range in pieces that fit the cache."""
        step = max(1, self.piece_bytes // item_bytes)
        for low in range(start, stop, step):
            yield low, min(stop, low + step)

    def _await(self, row: int, number: int, deadline: float, deadline_s: float) -> None:
        """Wait for all workers' numbers; spin briefly, then sleep, so that others can use the core.

        Each sleep is a small part of the time waited so far, so it delays little.
        """
        begun = time.perf_counter()
        while self.board.behind(row, number):
            self.meanwhile()
            waited = time.perf_counter() - begun
            if waited <= _SPIN_S:
                os.sched_yield()
            elif waited <= LONG_S:
                self._check_missing(row, number, deadline, deadline_s)
                time.sleep(sleep_s(waited))
            else:
                self._await_long(row, number, deadline, deadline_s)

    def _await_long(self, row: int, number: int, deadline: float, deadline_s: float) -> None:
        """Go on waiting, with a report."""
        end = None
        if self._watch is not None:
            wait = MemoryWait(self._first_tag + number, self.board, row, number)
            end = self._watch.report(wait, LONG_S)
        try:
            while self.board.behind(row, number):
                self.meanwhile()
                self._check_missing(row, number, deadline, deadline_s)
                time.sleep(_LONGEST_SLEEP_S)
        finally:
            if end is not None:
                end()

    def _check_missing(self, row: int, number: int, deadline: float, deadline_s: float) -> None:
        """Raise if a worker that is behind is gone or late. One that is not behind may have left."""
        try:
            self._check()
        except EchelonError:
            if self.board.behind(row, number):
                raise
        if time.monotonic() > deadline:
            behind = self.board.behind(row, number)
            if behind:
                doing = self._watch.about(behind) if self._watch is not None else ""
                raise blame.late(self._names, behind, deadline_s, self._names[self.rank], doing)


def _nothing() -> None:
    """There is only one team."""


def sleep_s(waited_s: float) -> float:
    """How long to sleep after having waited so long."""
    return min(max(waited_s / 32, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)


def sum_into(position: int, buffers: list[Tensor], low: int, high: int, op: Op) -> None:
    """Sum one piece in rank order, half precision in float32, and write it to one buffer only."""
    half = buffers[0].dtype in (torch.float16, torch.bfloat16)
    parts = [buffer[low:high].float() if half else buffer[low:high] for buffer in buffers]
    if len(parts) > 1:
        total = COMBINE[op](parts[0], parts[1])
        for other in parts[2:]:
            COMBINE[op](total, other, out=total)
        buffers[position][low:high].copy_(total)


def _sum_piece(buffers: list[Tensor], low: int, high: int, op: Op) -> None:
    """Sum one piece in rank order, half precision in float32, and write it to all buffers."""
    first = buffers[0][low:high]
    half = first.dtype in (torch.float16, torch.bfloat16)
    total = first.float() if half else first
    for other in buffers[1:]:
        COMBINE[op](total, other[low:high].float() if half else other[low:high], out=total)
    if half:
        first.copy_(total)
    for other in buffers[1:]:
        other[low:high].copy_(first)


COMBINE: dict[Op, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
