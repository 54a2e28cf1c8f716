"""How does a fast processor behave like a slower one, without root? It computes, then sleeps the rest.

A processor of `speed` 0.25 needs four times as long. So after `cpu` seconds of own computation there have
to be cpu * (1 / speed - 1) seconds of sleep, and that is the invariant: since `start()`, what has been
slept is what the computation so far is owed. `catch_up()` may be called as often as wanted, best at the
points where results leave the worker (each gradient bucket), so that they leave as late as they would.

Which clock says how long "own computation" was? The CPU time of the calling thread, `time.thread_time`:
- Wall time would also count the time during which other processes held the processor. Four workers on two
  cores would then slow each other down twice: once for real, once more by the sleep they think they owe.
- The process's CPU time adds up all threads: with N of them a computation would seem up to N times as long.
  Dividing by N is wrong wherever the work is not spread over all of them.
- torch's intra-op threads work beside the thread that called them, which takes its own part of every
  parallel region and waits, spinning, for the others. Forward runs in that thread, and so does
  backward on CPU, gradient hooks included. Its CPU time therefore is the time that the computation takes on
  undisturbed cores. Measured on a small CNN with two threads: wall 22.3 ms, this thread 22.1 ms, process
  43.9 ms; with two other processes on the same two cores: wall 55 ms, this thread 27 ms.

It is an approximation where more intra-op threads than cores make the caller spin for long (that counts),
or block (that does not), and it says nothing about work on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from echelon.errors import ConfigError


class Pace:
    """Sleeps so that the computation seems to run at `speed`. The thread that computes owns it."""

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
        """A computation begins; `slept_s` counts from here."""
        self.slept_s = 0.0
        if self._owed_per_cpu_s:
            self._cpu_at_start = self._cpu_clock()

    def catch_up(self) -> float:
        """Sleep what is owed since `start()`; returns the seconds slept just now.

        A sleep that the system made too long is deducted from the next one. Without a `start()`, and at
        full speed, nothing is owed and no clock is read.
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
