"""Whether workers save or stop now: SIGTERM, and times that all workers must agree on.

A worker that is told to stop (SIGTERM: its machine will be taken away) must not stop alone. Every quarter
of a second all workers tell each other whether one of them has to stop, whether a checkpoint is due by the
leader's clock, and whether one is still being written. The message is begun at one step and read at the
next, so nobody waits for it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group

_EVERY_S = 0.25
_MOST = 256  # calls between two messages


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all workers have agreed on."""

    stop: bool = False
    due: bool = False


class StopSignal:
    """Notes SIGTERM instead of ending the process; only the main thread can install it."""

    def __init__(self) -> None:
        self.received = False
        self._before: Any = None
        self._installed = False

    def install(self) -> None:
        """Note the signal from now on."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def remove(self) -> None:
        """Let the signal do what it did before."""
        if self._installed and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            self._installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True


class Agreement:
    """One worker's part in the messages. Workers that take the same steps call `look` after each."""

    def __init__(self, group: Group, clock: Callable[[], float] = time.monotonic) -> None:
        self._group = group.fork() if group.size > 1 else group
        self._clock = clock
        self._pending: Future[Tensor] | None = None
        self._calls = 0
        self._next = 1
        self._looked_at = clock()

    def look(self, *, stop: bool, due: bool, busy: bool) -> Agreed:
        """After a step: what was agreed on, if it was time to."""
        if self._group.size == 1:
            return Agreed(stop, due and not busy)
        self._calls += 1
        now = self._clock()
        took_s, self._looked_at = now - self._looked_at, now
        agreed = Agreed()
        if self._pending is not None:
            agreed, slowest_s = _read(self._pending.wait())
            self._pending = None
            self._next = self._calls + min(_MOST, math.ceil(_EVERY_S / max(slowest_s, 1e-6)))
        if self._calls >= self._next:
            self._pending = self._group.all_reduce(_told(stop, due, busy, took_s), "max")
        return agreed

    def place(self) -> list[int]:
        """Where this worker is, for one that comes back to the run."""
        return [self._calls, self._next, int(self._pending is not None)]

    def go_to(self, place: Sequence[int]) -> None:
        """Go on where another worker is."""
        self._calls, self._next, pending = place
        self._looked_at = self._clock()
        if pending:
            self._pending = self._group.all_reduce(_told(False, False, False, 0.0), "max")

    def now(self, *, stop: bool, due: bool) -> Agreed:
        """Agree at once, where all workers meet anyway; the leader decides what is due."""
        if self._group.size == 1:
            return Agreed(stop, due)
        told = _told(stop, due and self._group.rank == 0, False, 0.0)
        return _read(self._group.all_reduce(told, "max").wait())[0]


def _told(stop: bool, due: bool, busy: bool, took_s: float) -> Tensor:
    return torch.tensor([float(stop), float(due), float(busy), took_s], dtype=torch.float64)


def _read(told: Tensor) -> tuple[Agreed, float]:
    stop, due, busy, slowest_s = told.tolist()
    return Agreed(stop > 0, due > 0 and not busy), slowest_s
