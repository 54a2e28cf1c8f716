"""Emulates a slower processor without root: it computes, then sleeps.

A processor of `speed` 0.25 needs four times as long. So after `cpu` seconds of computation there must be
cpu * (1 / speed - 1) seconds of sleep. Invariant: since `start()`, the time slept equals the time due for
the computation so far. `catch_up()` may be called at any time, best where results leave the worker (each
gradient bucket), so that they leave as late as on the slower processor.

The clock for the computation is the CPU time of the calling thread, `time.thread_time`:
- Wall time would include time in which other processes used the processor. Four workers on two cores would
  slow each other down twice: once for real, and again through the sleep that this adds.
- The process's CPU time adds up all threads: with N of them a computation would seem up to N times as long.
  Dividing by N is wrong if the work is not spread over all of them.
- torch's intra-op threads work next to the calling thread, which takes its own part of every parallel
region
  and waits, spinning, for the others. Forward runs in that thread, and so does backward on CPU, including
  gradient hooks. So its CPU time is the time that the computation takes on undisturbed cores. Measured on a
  small CNN with two threads: wall 22.3 ms, this thread 22.1 ms, process 43.9 ms; with two other processes
  on the same two cores: wall 55 ms, this thread 27 ms.

It is an approximation if there are more intra-op threads than cores: then the caller may spin for long
(which counts), or block (which does not). It does not cover work on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from echelon.errors import ConfigError


class Pace:
    """Sleeps so that the computation seems to run at `speed`. Only the computing thread may use it."""

    def __init__(
        self,
        speed: float,
        *,
        cpu_clock: Callable[[], float] = time.thread_time,
        wall_clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not 0 < speed <= 1:
            raise ConfigError(
                f"speed is {speed:g}, it has to be above 0 and at most 1",
                where="pace, speed",
                fix="give the fraction of this processor's speed, such as 0.5",
            )
        self.speed = speed
        self.slept_s = 0.0
        self._owed_per_cpu_s = 1 / speed - 1
        self._cpu_clock = cpu_clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._cpu_at_start: float | None = None

    def start(self) -> None:
        """Mark the start of a computation; `slept_s` counts from here."""
        self.slept_s = 0.0
        if self._owed_per_cpu_s:
            self._cpu_at_start = self._cpu_clock()

    def catch_up(self) -> float:
        """Sleep for the time due since `start()`; returns the seconds slept in this call.

        A sleep that took too long is deducted from the next one. Without `start()`, and at full speed, it
        does not sleep and reads no clock.
        """
        if self._cpu_at_start is None:
            return 0.0
        owed_s = (self._cpu_clock() - self._cpu_at_start) * self._owed_per_cpu_s - self.slept_s
        if owed_s <= 0:
            return 0.0
        before = self._wall_clock()
        self._sleep(owed_s)
        slept_s = self._wall_clock() - before
        self.slept_s += slept_s
        return slept_s
