"""How does a worker sleep until another worker of its machine has published something?

Each worker has a word in shared memory on which it sleeps (a futex). Whoever publishes rings the bells of
workers that are asleep; for one that is awake this costs a read. A ring may be missed where the processor
reorders a write and a read of two workers. So a sleep is short, and the sleeper looks again.

Beside its word a worker notes on which core it began its last wait, or woke in it. Whoever waits for a
worker of its own core gives the core up at once: looking would only keep that one from running.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from echelon.comm.memory.cores import CoreChoice, current_core

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  # the number of the system call
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1
_LINE = 16  # int32 numbers per cache line: the word, and those below
_SLEEPERS, _CORE, _ROOM = 1, 2, 3  # how many threads sleep on it; 1 + the core; whether it waits for room


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None).syscall
_call.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int,
)


class Bells:
    """The bells of some workers; `rank` is this worker's position among them."""

    def __init__(self, rank: int, size: int, memory: Tensor) -> None:
        self._memory = memory
        self._numbers = memory.view(torch.int32).numpy().data
        self._address = memory.data_ptr()
        self._mine = rank * _LINE
        self._peers = [other * _LINE for other in range(size) if other != rank]
        self._sleepers = 0
        self._lock = threading.Lock()
        self._choice = CoreChoice()

    @staticmethod
    def size_bytes(size: int) -> int:
        """The memory for the bells of so many workers."""
        return size * _LINE * 4

    def ring(self) -> None:
        """Wake the workers that sleep, after something was published."""
        numbers = self._numbers
        for at in self._peers:
            if numbers[at + _SLEEPERS]:
                self._wake(at)

    def ring_one(self, rank: int) -> None:
        """Wake one worker, if it sleeps."""
        if self._numbers[rank * _LINE + _SLEEPERS]:
            self._wake(rank * _LINE)

    def ring_own(self) -> None:
        """Wake this worker's threads that sleep."""
        if self._numbers[self._mine + _SLEEPERS]:
            self._wake(self._mine)

    def ring_for_room(self, rank: int) -> None:
        """Wake one worker if it sleeps and waits for room, after some was made."""
        if self._numbers[rank * _LINE + _ROOM]:
            self.ring_one(rank)

    def wants_room(self, *, wants: bool) -> None:
        """Whether this worker waits for room."""
        self._numbers[self._mine + _ROOM] = wants

    def note_core(self) -> int:
        """Note on which core this thread is; returns 1 + the core."""
        self._numbers[self._mine + _CORE] = core = current_core() + 1
        return core

    def shares_core(self, others: Iterable[int]) -> bool:
        """Whether this thread is on the core where one of these workers was last.

        Before, it leaves that core if another one is free. It notes on which core it is.
        """
        core, numbers = self.note_core(), self._numbers
        if not core or all([numbers[rank * _LINE + _CORE] != core for rank in others]):  # noqa: C419 - faster
            return False
        if not self._choice.leave(core - 1):
            return True
        self.note_core()
        return False

    def sleep(self, seconds: float, asleep: Callable[[], object]) -> None:
        """Sleep until a peer rings, at most so long; not if `asleep` is false once peers would ring."""
        with self._lock:
            self._sleepers += 1
            self._numbers[self._mine + _SLEEPERS] = self._sleepers
        try:
            before = self._numbers[self._mine]
            with self._lock:  # peers see that this worker sleeps before it looks again
                pass
            if asleep():
                _sleep(self._address + 4 * self._mine, before, seconds)
        finally:
            with self._lock:
                self._sleepers -= 1
                self._numbers[self._mine + _SLEEPERS] = self._sleepers

    def _wake(self, at: int) -> None:
        self._numbers[at] = (self._numbers[at] + 1) & 0x3FFFFFFF
        if _FUTEX:
            _call(_FUTEX, self._address + 4 * at, _WAKE, _EVERYBODY, None, None, 0)


def _sleep(address: int, value: int, seconds: float) -> None:
    if not _FUTEX:
        time.sleep(min(seconds, 50e-6))
        return
    limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
    _call(_FUTEX, address, _WAIT, value, ctypes.byref(limit), None, 0)
