"""Carries out one worker's part of a schedule, step by step; adds pieces while they are in the cache.

Messages for the same elements are added in the order in which the step lists them, whatever the order in
which they arrive; early ones are kept aside. Two workers that exchange the same elements both add the
higher rank's to the lower rank's. So the bits of a result depend only on the buffers and the schedule.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.comm.group import Op
from echelon.comm.schedule.collective import Move, Schedule, ScheduleStep
from echelon.comm.wire.connection import Connection, Sink
from echelon.comm.wire.loop import Operation
from echelon.errors import Corrupt

Combine = Callable[[int, int, memoryview, bool], None]


def combiner(flat: Tensor, op: Op) -> Combine:
    """Combines a peer's bytes with elements `start` to `stop`; the flag: the peer's are the first operand.

    Half-precision numbers are added in float32. numpy adds the rest: one thread, no interpreter lock.
    """
    if flat.dtype in (torch.float16, torch.bfloat16):
        return _half(flat, op)
    own = flat.numpy()
    function: np.ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]

    def combine(start: int, stop: int, data: memoryview, first: bool) -> None:
        part = own[start:stop]
        theirs = np.frombuffer(data, dtype=own.dtype)
        if first:
            function(theirs, part, out=part)
        else:
            function(part, theirs, out=part)

    return combine


def _half(flat: Tensor, op: Op) -> Combine:
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]]
    functions = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    function = functions[op]

    def combine(start: int, stop: int, data: memoryview, first: bool) -> None:
        part = flat[start:stop]
        ours, theirs = part.float(), torch.frombuffer(data, dtype=flat.dtype).float()
        part.copy_(function(theirs, ours) if first else function(ours, theirs))

    return combine


def as_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any type."""
    raw: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return raw.data


class _Add(Sink):
    """Adds each piece when it arrives, if it may, and keeps it aside otherwise.

    It may when the step no longer sends these elements, and earlier messages have been added to them.
    """

    agreed = True

    def __init__(self, exchange: Exchange, move: Move, sends: int, before: list[_Add]) -> None:
        self.size_bytes = move.length * exchange.item_bytes
        self.move = move
        self.sends = sends
        self.added = move.start
        self._exchange = exchange
        self._before = before
        self._aside: deque[bytearray] = deque()

    def place(self, offset: int, length: int) -> memoryview | None:
        return None

    def take(self, offset: int, data: memoryview) -> None:
        exchange = self._exchange
        if len(data) % exchange.item_bytes:
            raise Corrupt(f"rank {self.move.peer} sent a part of an element", where="exchange")
        stop = self.move.start + (offset + len(data)) // exchange.item_bytes
        if self._aside or not self._may_add(stop):
            self._aside.append(bytearray(data))
            return
        self._add(stop, data)
        exchange.added(self)

    def catch_up(self) -> None:
        """Add the pieces that were kept aside, as far as it may."""
        while self._aside:
            data = self._aside[0]
            stop = self.added + len(data) // self._exchange.item_bytes
            if not self._may_add(stop):
                return
            self._aside.popleft()
            self._add(stop, memoryview(data))

    def finished(self) -> None:
        if not self.move.length:
            self._exchange.in_place()
        self._exchange.arrived(self.move)

    def _may_add(self, stop: int) -> bool:
        return not self.sends and all(other.added >= min(stop, other.move.stop) for other in self._before)

    def _add(self, stop: int, data: memoryview) -> None:
        begun = time.perf_counter()
        self._exchange.combine(self.added, stop, data, self.move.peer < self._exchange.rank)
        self._exchange.timing.adding_s += time.perf_counter() - begun
        self.added = stop
        if stop == self.move.stop:
            self._exchange.in_place()


class _Keep(Sink):
    """Copies pieces to the buffer, or to memory aside."""

    agreed = True

    def __init__(self, exchange: Exchange, move: Move, memory: memoryview) -> None:
        self.size_bytes = len(memory)
        self._exchange = exchange
        self._move = move
        self.memory = memory

    def place(self, offset: int, length: int) -> memoryview | None:
        return self.memory[offset : offset + length]

    def take(self, offset: int, data: memoryview) -> None:
        self.memory[offset : offset + len(data)] = data

    def finished(self) -> None:
        self._exchange.in_place()
        self._exchange.arrived(self._move)


class Exchange(Operation[Tensor]):
    """One worker's part of a collective on a buffer; its future gives `result` or `flat`.

    `parties`: workers without which it cannot end, also if it exchanges nothing with them itself.
    """

    def __init__(
        self,
        tag: int,
        flat: Tensor,
        schedule: Schedule,
        *,
        rank: int,
        op: Op,
        deadline_s: float,
        priority: int,
        result: Tensor | None = None,
        parties: Sequence[int] = (),
    ) -> None:
        super().__init__(tag, deadline_s, flat if result is None else result)
        self.parties = parties
        self.rank = rank
        self.item_bytes = flat.element_size()
        self.combine = combiner(flat, op)
        self._memory = as_bytes(flat)
        self._schedule = schedule
        self._priority = priority
        self._connections: Mapping[int, Connection] = {}
        self._at = -1
        self._open = 0
        self._moving = False
        # By peer: messages of this step in flight, and the number of the last one.
        self._sending: dict[int, int] = {}
        self._receiving: dict[int, int] = {}
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        # Of this step: adds in the order listed, and messages that overwrite elements not yet sent.
        self._adds: list[_Add] = []
        self._aside: list[tuple[Move, memoryview]] = []

    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Start the first step."""
        self._connections = connections
        self.timing.begun = time.perf_counter()
        self._proceed()

    def needs(self, rank: int) -> bool:
        """Whether the current step, or any later one, still sends to that peer or receives from it."""
        if self._sending.get(rank) or self._receiving.get(rank):
            return True
        rest = self._schedule[self._at + 1 :]
        if any(move.peer == rank for step in rest for move in step.sends):
            return True
        count = sum(move.peer == rank for step in rest for move in (*step.adds, *step.takes))
        first = self._in.get(rank, -1) + 1
        early = self._connections[rank]
        return not all(early.has((self.tag, number)) for number in range(first, first + count))

    def awaited(self) -> set[int]:
        """The peers whose messages the current step lacks; else those that do not receive what it sends."""
        # Copies: a waiting thread may ask, too.
        waiting = {rank for rank, count in list(self._receiving.items()) if count}
        return waiting or {rank for rank, count in list(self._sending.items()) if count}

    def requires(self, rank: int) -> bool:
        """Whether it is one of the parties, or awaited now."""
        return rank in self.parties or rank in self.awaited()

    def lacks(self, rank: int) -> bool:
        """Whether the current step lacks a message of that peer."""
        return bool(self._receiving.get(rank))

    def added(self, add: _Add) -> None:
        """Some elements were added: later messages may have waited for that."""
        if len(self._adds) > 1:
            for later in self._adds[self._adds.index(add) + 1 :]:
                later.catch_up()

    def in_place(self) -> None:
        """A message is added or copied."""
        self._open -= 1

    def arrived(self, move: Move) -> None:
        """A message has arrived; some of it may still be aside."""
        self._receiving[move.peer] -= 1
        self._proceed()

    def _sent(self, move: Move) -> None:
        self.timing.sent = time.perf_counter()
        self._sending[move.peer] -= 1
        self._open -= 1
        for add in self._adds:
            if _overlap(move, add.move):
                add.sends -= 1
            add.catch_up()
        self._proceed()

    def _proceed(self) -> None:
        """Enter the next steps while nothing is in flight. Early messages call this again."""
        if self._moving:
            return
        self._moving = True
        while not self._open and not self.ended:
            for move, memory in self._aside:
                self._range(move)[:] = memory
            self._adds, self._aside = [], []
            self._at += 1
            if self._at < len(self._schedule):
                self._enter(self._schedule[self._at])
            else:
                self.end()
        self._moving = False

    def _enter(self, step: ScheduleStep) -> None:
        for move in step.sends:
            self._sending[move.peer] = self._sending.get(move.peer, 0) + 1
        for move in (*step.adds, *step.takes):
            self._receiving[move.peer] = self._receiving.get(move.peer, 0) + 1
        self._open = len(step.sends) + len(step.adds) + len(step.takes)
        for move in step.adds:
            sends = sum(_overlap(move, sent) for sent in step.sends)
            before = [add for add in self._adds if _overlap(add.move, move)]
            self._adds.append(_Add(self, move, sends, before))
        for move in step.sends:
            self._send(move)
        for add in list(self._adds):
            self._expect(add.move, add)
        for move in step.takes:
            self._expect(move, self._taking(move, step))

    def _taking(self, move: Move, step: ScheduleStep) -> Sink:
        if any(_overlap(move, sent) for sent in step.sends):
            memory = memoryview(bytearray(move.length * self.item_bytes))
            self._aside.append((move, memory))
            return _Keep(self, move, memory)
        return _Keep(self, move, self._range(move))

    def _range(self, move: Move) -> memoryview:
        return self._memory[move.start * self.item_bytes : move.stop * self.item_bytes]

    def _send(self, move: Move) -> None:
        number = self._out[move.peer] = self._out.get(move.peer, -1) + 1
        self._connections[move.peer].send(
            (self.tag, number), self._range(move), self._priority, lambda: self._sent(move)
        )

    def _expect(self, move: Move, sink: Sink) -> None:
        number = self._in[move.peer] = self._in.get(move.peer, -1) + 1
        self._connections[move.peer].expect((self.tag, number), sink)


def _overlap(one: Move, other: Move) -> bool:
    return one.start < other.stop and other.start < one.stop
