"""Which core does a thread run on, and when should it leave it for a free one?

Two workers that exchange something on one core take turns on it, although another core may be free. Linux
moves one of them, but only after a while: to its balancing, two processes that both yield look busy.
"""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import suppress
from pathlib import Path

_PAUSE_S = 0.02  # between two tries
_LOAD = Path("/proc/loadavg")
_current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)  # not in every C library


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def current_core() -> int:
    """The core that this thread runs on; -1 if the system does not say."""
    return -1 if _current_core is None else int(_current_core())


class CoreChoice:
    """Moves threads of this process to a free core."""

    def __init__(self) -> None:
        self._next_try = 0.0

    def leave(self, core: int) -> bool:
        """Leave this core if another one is free; returns whether this thread did.

        Linux puts the thread elsewhere when it may not use its core. At once it may use all as before.
        """
        now = time.monotonic()
        if now < self._next_try:
            return False
        self._next_try = now + _PAUSE_S
        allowed = os.sched_getaffinity(0)
        others = allowed - {core}
        if not others or _running() > len(allowed):
            return False
        with suppress(OSError):
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, allowed)
        return True


def _running() -> int:
    """How many threads of the machine want to run now."""
    try:
        return int(_LOAD.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 1 << 30
