"""Operations among workers of one machine through slots in shared memory: any tensor, any group of them.

Every piece of an operation has a number; all workers count alike. A worker copies its part of piece n to
its slot and publishes `ready` = n. When all are ready, each takes what it needs out of the others' slots
and publishes `read` = n; a slot is written again only when all have read it. Sums of long tensors have a
stage in between: each worker sums its share of the slots and publishes `summed` = n.

Beside its first piece a worker writes a head: which operation this is. So workers that make different calls
notice it, all of them and at once, and nobody takes another operation's bytes for its own.

Operations of one team end in the order in which they begin. A thread that waits for one does the work of
all before it; threads that wait elsewhere call `advance`, which never waits.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.comm.future import Timing
from echelon.comm.group import CallsDiffer
from echelon.comm.memory.bell import Bells
from echelon.comm.memory.patience import Check, Patience
from echelon.comm.memory.shm import Board
from echelon.comm.wire.frames import CHANNEL_BITS
from echelon.comm.wire.watch import SLOT_CHANNELS, Watch
from echelon.errors import RoundTimeout

READY, SUMMED, READ = 0, 1, 2  # rows of the board
ROWS = 3
SLOT_BYTES = 16 * 1024
_PIECE_BYTES = 256 * 1024  # a part of a long tensor
_LEAST_PIECE_BYTES = 32 * 1024
_LARGE_BYTES = 2 * 1024 * 1024  # for the pieces of all workers, if they are few
_DEPTH = 4  # small slots of each worker
_LARGE_DEPTH = 2
_HEAD_WORDS = 8
_MOST_VIEWS = 1024

Mismatch = Callable[[str], Exception]


class Head(NamedTuple):
    """Which operation a worker takes part in. `call`: what its script calls, by number; 0 if unknown.

    `kind` and `length_bytes` are for the error; workers agree if `facts` and `call` are equal.
    """

    kind: int
    length_bytes: int
    facts: int
    call: int = 0


class SlotWork(ABC):
    """One worker's part of an operation, in `count` pieces. Subclasses say what is copied where."""

    small = True
    sums = False  # whether there is a stage between writing and reading

    def __init__(self, head: Head, count: int = 1) -> None:
        self.head = head
        self.count = count
        self.first = 0  # the number of its first piece
        self.written = 0
        self.summed = 0
        self.done = 0
        self.agreed = False
        self.error: Exception | None = None
        self.timing = Timing()

    @property
    def finished(self) -> bool:
        """Whether it is over."""
        return self.done == self.count or self.error is not None

    @abstractmethod
    def write(self, at: int, slot: int) -> None:
        """Copy this worker's part of a piece to its slot."""

    def sum(self, at: int, slot: int) -> None:  # noqa: B027 - most have no such stage
        """Compute this worker's share of the sums."""

    @abstractmethod
    def read(self, at: int, slot: int) -> None:
        """Take what this worker needs out of all slots."""


class SlotTeam:
    """Workers of one machine; `rank` is a position among them, `ranks` are those in the view.

    `mismatch` gets which operations workers take part in, if they differ, and returns the error.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        names: Sequence[str],
        memory: Tensor,
        *,
        check: Check,
        mismatch: Mismatch,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        parts = torch.split(memory, _parts(self.size))
        self._board = Board(rank, self.size, parts[0], rows=ROWS)
        self.bells = Bells(rank, self.size, parts[1])
        self._heads = parts[2].view(torch.int64).numpy().data
        self._memory = memory
        self._small = parts[3]
        self._large = parts[4]
        self.piece_bytes = _piece_bytes(self.size)
        self._mismatch = mismatch
        self._patience = Patience(ranks, names, names[rank], bells=self.bells, check=check)
        self._number = 0
        self._open: deque[SlotWork] = deque()
        self._working = threading.Lock()
        self._broken: Exception | None = None
        self._views: dict[tuple[int, bool, int, torch.dtype], list[Tensor]] = {}
        self._first_tag = 0

    @staticmethod
    def size_bytes(size: int) -> int:
        """The memory for a team of so many workers."""
        return sum(_parts(size))

    def report_to(self, watch: Watch, channel: int, meanwhile: Callable[[], None]) -> None:
        """Report long waits under this group's channel; call `meanwhile` while waiting."""
        self._first_tag = (SLOT_CHANNELS + channel) << CHANNEL_BITS
        watch.slots[channel] = self.has_begun
        self._patience.watch = watch
        self._patience.meanwhile = meanwhile

    def has_begun(self, number: int) -> bool:
        """Whether this worker has begun the operation of that piece."""
        return number <= self._number

    def address(self, rank: int, slot: int, *, small: bool) -> int:
        """Where a slot begins."""
        if small:
            return self._small.data_ptr() + (rank * _DEPTH + slot) * SLOT_BYTES
        return self._large.data_ptr() + (rank * _LARGE_DEPTH + slot) * self.piece_bytes

    def views(self, slot: int, length: int, dtype: torch.dtype, *, small: bool) -> list[Tensor]:
        """The first elements of the slots of all workers."""
        key = (slot, small, length, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > _MOST_VIEWS:
                self._views.clear()
            memory = self._small if small else self._large
            depth, stride = (_DEPTH, SLOT_BYTES) if small else (_LARGE_DEPTH, self.piece_bytes)
            size_bytes = length * torch.empty(0, dtype=dtype).element_size()
            starts = [(rank * depth + slot) * stride for rank in range(self.size)]
            found = [memory[start : start + size_bytes].view(dtype) for start in starts]
            self._views[key] = found
        return found

    # Operations ----------------------------------------------------------------------------------

    def begin(self, work: SlotWork) -> None:
        """Begin an operation; its first pieces are published if their slots are free."""
        watch = self._patience.watch
        if watch is not None and watch.beginner != threading.get_ident():
            watch.begins(threading.get_ident())
        work.first = self._number + 1
        self._number += work.count
        self._open.append(work)
        work.timing.begun = work.timing.sent = time.perf_counter()
        if len(self._open) == 1 and self._working.acquire(blocking=False):
            try:
                if self._open and self._open[0] is work and self._broken is None:
                    self._write(work)
            finally:
                self._working.release()
        else:
            self.advance()

    def finish(self, work: SlotWork, deadline_s: float, timeout_s: float | None = None) -> None:
        """Wait until it is over. After `timeout_s`, which may be shorter, it stays in flight."""
        limit_s = deadline_s if timeout_s is None else timeout_s
        with self._working:
            while not work.finished:
                if self._broken is not None:
                    raise self._broken
                try:
                    self._complete(self._open[0], limit_s, endless=timeout_s is None)
                except Exception as error:
                    if timeout_s is None or not isinstance(error, RoundTimeout):
                        self._broken = error
                    raise
                self._open.popleft()
        if work.error is not None:
            raise work.error

    def advance(self) -> bool:
        """Do what needs no waiting; returns whether operations are left."""
        if self._broken is not None or not self._open:
            return False
        if self._working.acquire(blocking=False):
            some_ended = False
            try:
                while self._open and self._proceed(self._open[0]):
                    self._open.popleft()
                    some_ended = True
                before_all_written = True
                for work in list(self._open):  # another thread may begin one meanwhile
                    before_all_written = before_all_written and self._write(work)
            except Exception as error:  # noqa: BLE001 - whoever waits for it raises it
                self._broken = error
            finally:
                self._working.release()
            if some_ended:
                self.bells.ring_own()  # another thread may sleep until one is over
        return bool(self._open)

    def has_finished(self, work: SlotWork) -> bool:
        """Whether `finish` would return or raise at once."""
        if not work.finished:
            self.advance()
        return work.finished or self._broken is not None

    def _complete(self, work: SlotWork, limit_s: float, *, endless: bool) -> None:
        while not self._proceed(work):
            row, number = self._awaited(work)
            self._patience.until_none(
                partial(self._board.behind, row, number),
                tag=self._first_tag + work.first,
                limit_s=limit_s,
                endless=endless,
            )

    def _awaited(self, work: SlotWork) -> tuple[int, int]:
        """The row and number on the board without which it cannot go on."""
        number = work.first + work.done
        if work.written == work.done:
            return READ, number - (_DEPTH if work.small else _LARGE_DEPTH)
        if work.sums and work.summed > work.done:
            return SUMMED, number
        return READY, number

    def _write(self, work: SlotWork) -> bool:
        """Publish its next pieces, if their slots are free; returns whether all are published."""
        while work.written < work.count:
            if work.written and work.head.call and not work.agreed:
                return False  # if scripts make different calls, only one piece was published
            number = work.first + work.written
            depth = _DEPTH if work.small else _LARGE_DEPTH
            if self._board.behind(READ, number - depth):
                return False
            work.write(work.written, number % depth)
            if not work.written:
                at = (number % _DEPTH * self.size + self.rank) * _HEAD_WORDS
                self._heads[at], self._heads[at + 1], self._heads[at + 2], self._heads[at + 3] = work.head
            work.written += 1
            self._publish(READY, number)
        work.timing.sent = time.perf_counter()
        return True

    def _proceed(self, work: SlotWork) -> bool:
        """Do what can be done without waiting; returns whether it is over."""
        while True:
            self._write(work)
            number = work.first + work.done
            if work.written == work.done or self._board.behind(READY, number):
                return False
            if not work.agreed and not self._agree(work):
                return True
            slot = number % (_DEPTH if work.small else _LARGE_DEPTH)
            if work.sums:
                if work.summed == work.done:
                    begun = time.perf_counter()
                    work.sum(work.done, slot)
                    work.timing.adding_s += time.perf_counter() - begun
                    work.summed += 1
                    self._publish(SUMMED, number)
                if self._board.behind(SUMMED, number):
                    return False
            work.read(work.done, slot)
            self._publish(READ, number)
            work.done += 1
            if work.done == work.count:
                work.timing.ended = time.perf_counter()
                return True

    def _publish(self, row: int, number: int) -> None:
        self._board.publish(row, number)
        self.bells.ring()

    def _agree(self, work: SlotWork) -> bool:
        """Whether all workers take part in this operation; raises if nobody can go on."""
        at = work.first % _DEPTH * self.size * _HEAD_WORDS
        _, _, facts, call = work.head
        heads = self._heads
        for start in range(at, at + self.size * _HEAD_WORDS, _HEAD_WORDS):
            if heads[start + 2] != facts or heads[start + 3] != call:
                break
        else:
            work.agreed = True
            return True
        found = [
            Head(*heads[s : s + 4].tolist()) for s in range(at, at + self.size * _HEAD_WORDS, _HEAD_WORDS)
        ]
        if not all(head.call for head in found) or len({head.call for head in found}) == 1:
            raise self._mismatch(_described(self.ranks, found))
        # All scripts make calls of the session, which they can describe to each other.
        work.error = CallsDiffer([head.call for head in found])
        self._number = work.first
        self._publish(READ, work.first)
        return False


def _parts(size: int) -> list[int]:
    """The bytes of the board, the bells, the heads, the small slots and the large ones."""
    heads = _DEPTH * size * _HEAD_WORDS * 8
    small, large = size * _DEPTH * SLOT_BYTES, size * _LARGE_DEPTH * _piece_bytes(size)
    return [Board.size_bytes(size, ROWS), Bells.size_bytes(size), heads, small, large]


def _piece_bytes(size: int) -> int:
    """How long the pieces of long tensors are: a power of two, so that they have whole elements."""
    fair = _LARGE_BYTES // _LARGE_DEPTH // size
    return min(_PIECE_BYTES, max(_LEAST_PIECE_BYTES, 1 << (fair.bit_length() - 1)))


KINDS = ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "barrier")


def _described(ranks: Sequence[int], heads: Sequence[Head]) -> str:
    said = [
        f"rank {rank} takes part in {KINDS[head.kind]} of {head.length_bytes} bytes"
        for rank, head in zip(ranks, heads, strict=True)
    ]
    return ", ".join(said)
