"""How does a worker sleep until another worker of its machine has published something?

Each worker has a word in shared memory on which it sleeps (a futex). Whoever publishes rings the bells of
workers that are asleep; for one that is awake this costs a read. A ring may be missed where the processor
reorders a write and a read of two workers. So a sleep is short, and the sleeper looks again.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  # the number of the system call
_WAIT, _WAKE = 0, 1
_EVERYBODY = (1 << 31) - 1
_LINE = 16  # int32 numbers per cache line: the word, and how many threads sleep on it


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

    @staticmethod
    def size_bytes(size: int) -> int:
        """The memory for the bells of so many workers."""
        return size * _LINE * 4

    def ring(self) -> None:
        """Wake the workers that sleep, after something was published."""
        numbers = self._numbers
        for at in self._peers:
            if numbers[at + 1]:
                self._wake(at)

    def ring_one(self, rank: int) -> None:
        """Wake one worker, if it sleeps."""
        if self._numbers[rank * _LINE + 1]:
            self._wake(rank * _LINE)

    def sleep(self, seconds: float, asleep: Callable[[], object]) -> None:
        """Sleep until a peer rings, at most so long; not if `asleep` is false once peers would ring."""
        with self._lock:
            self._sleepers += 1
            self._numbers[self._mine + 1] = self._sleepers
        try:
            before = self._numbers[self._mine]
            with self._lock:  # peers see that this worker sleeps before it looks again
                pass
            if asleep():
                _sleep(self._address + 4 * self._mine, before, seconds)
        finally:
            with self._lock:
                self._sleepers -= 1
                self._numbers[self._mine + 1] = self._sleepers

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


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))
