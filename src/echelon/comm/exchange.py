"""Carries out one worker's schedule: step by step, adding what comes in while it is in the cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.comm.collective import Move, Schedule, Step
from echelon.comm.connection import Connection, Sink
from echelon.comm.group import Op
from echelon.comm.loop import Operation

Combine = Callable[[int, int, memoryview], None]


def combiner(flat: Tensor, op: Op) -> Combine:
    """How bytes from a peer enter elements `start` to `stop` of a tensor.

    Half-precision numbers are added in float32. numpy does the rest: one thread, no interpreter lock.
    """
    if flat.dtype in (torch.float16, torch.bfloat16):
        return _half(flat, op)
    own = flat.numpy()
    function: np.ufunc = {"sum": np.add, "max": np.maximum, "min": np.minimum}[op]

    def combine(start: int, stop: int, data: memoryview) -> None:
        part = own[start:stop]
        function(part, np.frombuffer(data, dtype=own.dtype), out=part)

    return combine


def _half(flat: Tensor, op: Op) -> Combine:
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]]
    functions = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}
    function = functions[op]

    def combine(start: int, stop: int, data: memoryview) -> None:
        part = flat[start:stop]
        theirs = torch.frombuffer(data, dtype=flat.dtype)
        part.copy_(function(part.float(), theirs.float()))

    return combine


def as_bytes(flat: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any type."""
    raw: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return raw.data


class _Add(Sink):
    """Adds each piece as it comes."""

    def __init__(self, exchange: Exchange, move: Move) -> None:
        self.size_bytes = move.length * exchange.item_bytes
        self._exchange = exchange
        self._move = move

    def place(self, offset: int, length: int) -> memoryview | None:
        return None

    def take(self, offset: int, data: memoryview) -> None:
        item = self._exchange.item_bytes
        start = self._move.start + offset // item
        self._exchange.combine(start, start + len(data) // item, data)

    def finished(self) -> None:
        self._exchange.received(self._move)


class _Keep(Sink):
    """Puts pieces in their place, in the buffer or in memory beside it."""

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
        self._exchange.received(self._move)


class Exchange(Operation):
    """One worker's part in a collective on one buffer."""

    def __init__(
        self,
        tag: int,
        flat: Tensor,
        schedule: Schedule,
        *,
        op: Op,
        deadline_s: float,
        priority: int,
    ) -> None:
        super().__init__(tag, deadline_s)
        self.item_bytes = flat.element_size()
        self.combine = combiner(flat, op)
        self._flat = flat
        self._memory = as_bytes(flat)
        self._schedule = schedule
        self._priority = priority
        self._connections: Mapping[int, Connection] = {}
        self._at = -1
        self._sending: dict[int, int] = {}
        self._receiving: dict[int, int] = {}
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        self._later: list[tuple[Move, memoryview, bool]] = []

    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Start the first step."""
        self._connections = connections
        self._next()

    def peers(self) -> set[int]:
        """Those that the current step, or any later one, needs."""
        now = {rank for rank, count in (*self._sending.items(), *self._receiving.items()) if count}
        rest = self._schedule[self._at + 1 :]
        return now | {m.peer for step in rest for m in (*step.sends, *step.adds, *step.takes)}

    def awaited(self) -> set[int]:
        """Those from whom the current step still needs something."""
        return {rank for rank, count in self._receiving.items() if count}

    def _next(self) -> None:
        self._at += 1
        if self._at >= len(self._schedule):
            self.end()
            return
        step = self._schedule[self._at]
        for move in step.sends:
            self._sending[move.peer] = self._sending.get(move.peer, 0) + 1
        for move in (*step.adds, *step.takes):
            self._receiving[move.peer] = self._receiving.get(move.peer, 0) + 1
        for move in step.sends:
            self._send(move)
        for move in step.adds:
            self._expect(move, step, add=True)
        for move in step.takes:
            self._expect(move, step, add=False)

    def _range(self, move: Move) -> memoryview:
        return self._memory[move.start * self.item_bytes : move.stop * self.item_bytes]

    def _send(self, move: Move) -> None:
        number = self._out[move.peer] = self._out.get(move.peer, -1) + 1

        def sent() -> None:
            self._sending[move.peer] -= 1
            self._step_over()

        self._connections[move.peer].send((self.tag, number), self._range(move), self._priority, sent)

    def _expect(self, move: Move, step: Step, *, add: bool) -> None:
        number = self._in[move.peer] = self._in.get(move.peer, -1) + 1
        sink: Sink
        if any(move.start < sent.stop and sent.start < move.stop for sent in step.sends):
            # The step still sends from there: keep it beside, and use it when all is sent.
            memory = memoryview(bytearray(move.length * self.item_bytes))
            self._later.append((move, memory, add))
            sink = _Keep(self, move, memory)
        elif add:
            sink = _Add(self, move)
        else:
            sink = _Keep(self, move, self._range(move))
        self._connections[move.peer].expect((self.tag, number), sink)

    def received(self, move: Move) -> None:
        """All of a message is there."""
        self._receiving[move.peer] -= 1
        self._step_over()

    def _step_over(self) -> None:
        if self.ended or any(self._sending.values()) or any(self._receiving.values()):
            return
        later, self._later = self._later, []
        for move, memory, add in later:
            if add:
                self.combine(move.start, move.stop, memory)
            else:
                self._range(move)[:] = memory
        self._next()
