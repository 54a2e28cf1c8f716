"""Carries out the operations of a process group in the order of their calls.

All members must begin the same operations in the same order. A call that the script waits for at once is
carried out by the thread that waits: handing it to another thread would cost more than a small reduction.
Others are carried out by a thread of the group, so that they go on while the script computes, also if it
never waits.

An operation is a generator. It begins operations of the group, yields their futures, and is resumed when
one is done. One that yields once is `brief`: the next operation may begin before it is done.

After an error the members no longer agree on what was done, so all later operations fail with it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Protocol, TypeVar

from torch import Tensor

from echelon.comm.future import Future
from echelon.errors import EchelonError, RoundTimeout

T = TypeVar("T")
Part = Generator[Future[Any], None, T]  # begins operations of the group, and waits for each
Steps = Part[list[Tensor]]
_MOST_IN_FLIGHT = 4


class Job:
    """One operation: done when its steps are, with a result or an error."""

    def __init__(self, steps: Steps, deadline_s: float, *, brief: bool = False) -> None:
        self.brief = brief
        self.error: BaseException | None = None
        self.result: list[Tensor] = []
        self._steps = steps
        self._until = time.monotonic() + deadline_s
        self._deadline_s = deadline_s
        self._future: Future[Any] | None = None
        self._done = False
        self.turn = threading.Lock()  # for a driver
        self._lock = threading.Lock()
        self._gate = threading.Lock()
        self._gate.acquire()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self._done

    def begin(self) -> None:
        """Carry out the first step, up to its future."""
        self._advance()

    def finish(self, limit_s: float = math.inf) -> None:
        """Carry out the rest, or as much as is done within the limit; never raises."""
        until = time.monotonic() + limit_s
        while not self._done:
            future = self._future
            assert future is not None
            left_s = min(until, self._until) - time.monotonic()
            try:
                future.wait(max(0.0, left_s))
            except RoundTimeout as error:
                if until < self._until and time.monotonic() >= until:
                    return
                error.message = _dated(error.message, self._deadline_s)
                self.end(error)
            except Exception as error:  # noqa: BLE001 - whoever waits for it must learn of any error
                self.end(error)
            else:
                self._advance()

    def look(self) -> None:
        """Carry out what needs no waiting."""
        while not self._done and self._future is not None and self._future.done():
            self.finish()

    def _advance(self) -> None:
        try:
            self._future = next(self._steps)
        except StopIteration as stop:
            self.result = stop.value
            self.end()
        except Exception as error:  # noqa: BLE001 - as in `finish`
            self.end(error)

    def end(self, error: BaseException | None = None) -> None:
        """It is over; the first call counts."""
        with self._lock:
            if self._done:
                return
            self.error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        self._future = None
        self._steps.close()
        self._gate.release()
        for callback in callbacks:
            callback()

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call back once, from the thread that ends it; now if it is over."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def blocked(self, timeout_s: float) -> bool:
        """Wait for another thread to end it; whether that took longer."""
        if self._gate.acquire(timeout=timeout_s):
            self._gate.release()
            return False
        return True


class Driver(Protocol):
    """What carries out a job."""

    def wait(self, job: Job, timeout_s: float | None = None) -> bool:
        """Until it is over, or at most so long; returns whether it is over."""

    def look(self, job: Job) -> bool:
        """Whether it is over, now."""

    def hasten(self, job: Job) -> None:
        """Let it end even if nobody waits for it."""


class Apart:
    """Carries out jobs that have no order, each by the thread that waits for it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def wait(self, job: Job, timeout_s: float | None = None) -> bool:
        """Here."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not job.done and time.monotonic() < until:
            if job.turn.acquire(timeout=min(1.0, max(0.0, until - time.monotonic()))):
                try:
                    job.finish(until - time.monotonic())
                finally:
                    job.turn.release()
        return job.done

    def look(self, job: Job) -> bool:
        """Take in what has arrived."""
        if not job.done and job.turn.acquire(blocking=False):
            try:
                job.look()
            finally:
                job.turn.release()
        return job.done

    def hasten(self, job: Job) -> None:
        """In a thread of its own: few scripts ask for the future of a message."""
        threading.Thread(target=self.wait, args=(job,), name=self._name, daemon=True).start()


class CallOrder:
    """The operations of one process group."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: deque[Job] = deque()
        self._running = threading.Lock()  # held by the thread that carries out operations
        self._woken = threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._broken: BaseException | None = None
        self._closed = False

    def submit(self, job: Job, *, background: bool) -> None:
        """Add an operation. `background`: it must go on even if nobody waits for it."""
        if self._broken is not None:
            job.end(self._broken)
            return
        self._jobs.append(job)
        if background:
            self.wake()

    def wake(self) -> None:
        """Let the group's thread carry out what there is."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._woken.release()

    def wait(self, job: Job, timeout_s: float | None = None) -> bool:
        """Wait for an operation: carry it out here, or wait for the thread that does.

        With `timeout_s`, at most that long; returns whether it is over.
        """
        if timeout_s is not None:
            if not job.done:
                self.wake()
            return not job.blocked(timeout_s)
        while not job.done:
            if self._running.acquire(blocking=False):
                try:
                    self._carry_out(lambda: job.done)
                finally:
                    self._running.release()
                if self._jobs:
                    self.wake()
            else:
                job.blocked(1.0)
        return True

    def look(self, job: Job) -> bool:
        """The group's thread carries it out."""
        return job.done

    def hasten(self, job: Job) -> None:
        """The group's thread carries it out."""
        self.wake()

    def fail(self, error: BaseException) -> None:
        """End all operations that have not begun, now and later."""
        self._broken = self._broken or error
        while self._jobs:
            self._jobs.popleft().end(self._broken)

    def close(self, error: EchelonError) -> None:
        """End all operations, and the thread."""
        self._closed = True
        self.fail(error)
        if self._thread is not None:
            self._woken.release()
            if self._thread is not threading.current_thread():
                self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closed:
            self._woken.acquire()
            while self._jobs and self._running.acquire(blocking=False):
                try:
                    self._carry_out(lambda: False)
                finally:
                    self._running.release()

    def _carry_out(self, enough: Callable[[], bool]) -> None:
        """Carry out operations in order until there are none, or `enough`."""
        begun: deque[Job] = deque()
        while (self._jobs or begun) and (begun or not enough()):
            while self._jobs and self._may_begin(begun, self._jobs[0]):
                job = self._jobs.popleft()
                job.begin()
                if job.error is not None:
                    self.fail(job.error)
                elif not job.done:
                    begun.append(job)
            if begun:
                job = begun.popleft()
                job.finish()
                if job.error is not None:
                    self.fail(job.error)

    @staticmethod
    def _may_begin(begun: deque[Job], job: Job) -> bool:
        """Only brief operations overlap: a longer one begins further steps when earlier ones are done."""
        if not begun:
            return True
        return len(begun) < _MOST_IN_FLIGHT and begun[-1].brief


def _dated(message: str, deadline_s: float) -> str:
    """The group says how long the last wait was; the script knows the operation's whole deadline."""
    before, found, after = message.partition(" did not arrive within ")
    return f"{before}{found}{deadline_s:g} s{after.partition(' s')[2]}" if found else message
