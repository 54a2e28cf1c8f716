"""Did the training thread have a core? Its time on one, and its time ready to run without one.

Both grow only while the thread runs or wants to run, so over a step they tell a slow worker from one that
sleeps, and from one whose core is taken by others. While a worker waits for others it may spin, or be
slow to wake up; that time is left out.

The time without a core comes from Linux's `/proc/thread-self/schedstat` (its second number, nanoseconds),
which takes about a microsecond to read, as the other one does. Elsewhere it is unknown.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

_FILE = "/proc/thread-self/schedstat"
_LONGEST_BYTES = 100
_QUICK_S = 50e-6
_MOST_TRIES = 4
_RECORD = re.compile(rb"\d+ \d+ [1-9]\d*\s*")  # the last one is 0 if the system keeps no record


ThreadReading: TypeAlias = tuple[int, float, float | None]
"""Which thread; its seconds on a core up to now, and ready without one, None if unknown."""


class ThreadReader:
    """Reads the times of the calling thread; it opens the file once for each thread that it meets."""

    def __init__(self, file: str = _FILE) -> None:
        self._path = file
        self._thread = 0
        self._file: int | None = None
        self._close: weakref.finalize[..., ThreadReader] | None = None

    def __call__(self) -> ThreadReading:
        """The times of the calling thread up to now."""
        thread = threading.get_ident()
        if thread != self._thread:
            self._open(thread)
        if self._file is None:
            return thread, time.thread_time(), None
        for _ in range(_MOST_TRIES):
            begun = time.perf_counter()
            _, starved_ns, _ = os.pread(self._file, _LONGEST_BYTES, 0).split()
            cpu_s = time.thread_time()
            # A thread often loses its core in a call of the system: then what was read is out of date.
            if time.perf_counter() - begun < _QUICK_S:
                break
        return thread, cpu_s, int(starved_ns) * 1e-9

    def _open(self, thread: int) -> None:
        """The path leads to the thread that opens it, and the open file stays with that one."""
        if self._close is not None:
            self._close()
        self._thread, self._file, self._close = thread, None, None
        try:
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        self._close = weakref.finalize(self, os.close, file)
        if _RECORD.fullmatch(os.pread(file, _LONGEST_BYTES, 0)):
            self._file = file


class ThreadTimes:
    """Adds up a thread's times, but for the stretches in which it waits for other workers."""

    def __init__(self, read: Callable[[], ThreadReading] | None = None) -> None:
        self._read = read or ThreadReader()
        self._since = self._read()
        self._held = False
        self._mark: ThreadReading | None = None
        self._cpu_s: float | None = 0.0
        self._starved_s: float | None = 0.0

    def hold(self) -> None:
        """The thread begins to wait for other workers."""
        if not self._held:
            self._add(self._read())
            self._held = True

    def resume(self) -> None:
        """The wait, if there was one, is over."""
        if self._held:
            self._since = self._read()
            self._held = False

    def mark(self) -> None:
        """From here on the thread may turn out to have waited."""
        self._mark = self._read()

    def forget(self) -> None:
        """It did wait since the mark."""
        if self._mark is not None and not self._held:
            self._add(self._mark)
            self._since, self._mark = self._read(), None

    def take(self) -> tuple[float | None, float | None]:
        """Seconds on a core, and ready without one, since the last call; None if unknown."""
        now = self._read()
        if not self._held:
            self._add(now)
        taken = self._cpu_s, self._starved_s
        self._since, self._held, self._mark = now, False, None
        self._cpu_s = self._starved_s = 0.0
        return taken

    def _add(self, now: ThreadReading) -> None:
        """Add the stretch up to now; if another thread had begun it, nothing is known."""
        thread, cpu_s, starved_s = now
        began, since_cpu_s, since_starved_s = self._since
        if thread != began or self._cpu_s is None:
            self._cpu_s = self._starved_s = None
            return
        self._cpu_s += cpu_s - since_cpu_s
        if self._starved_s is None or starved_s is None or since_starved_s is None:
            self._starved_s = None
        else:
            self._starved_s += starved_s - since_starved_s
