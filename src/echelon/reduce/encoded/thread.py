"""The codec thread, which encodes and decodes while backward goes on.

A job is a generator: it starts an exchange, yields its future, and is resumed when that is done. Jobs enter
each stage in the order in which they were submitted, on every worker: job k after job k-1. So the exchanges
of a stage, which has a group of its own, begin in the same order on all workers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from echelon.comm.future import Alarm, Future, Timing
from echelon.comm.inbox import Inbox
from echelon.errors import GradientError

_LOOK_S = 2e-4  # where nobody rings
_SLEEP_S = 1e-3
_LONG_S = 0.2

Steps = Generator[Future[Any], None, None]


class BucketJob:
    """The stages of one bucket; `progress` is that of its group."""

    def __init__(self, steps: Steps, progress: Callable[[], None], timing: Timing | None) -> None:
        self.steps = steps
        self.stage = 0
        self.awaited: Future[Any] | None = None
        self.silent = False  # whether the awaited future calls nobody back
        self.future: Future[None] = Future(self, timing)
        self._progress = progress

    def progress(self) -> bool:
        """As its group does; the codec thread goes on with the rest."""
        self._progress()
        return False

    def limit_s(self) -> None:
        """None: every exchange has a deadline of its own."""

    def overdue(self, timeout_s: float | None) -> Exception:
        """Names those whom the current exchange awaits."""
        return (self.awaited or Future[Any]()).overdue(timeout_s)

    def stalled(self, waited_s: float, *, endless: bool) -> Callable[[], None] | None:
        """Reports the current exchange; between two exchanges the codec is at work."""
        if self.awaited is None or self.awaited.done():
            return None
        return self.awaited.stalled(waited_s, endless=endless)


class CodecThread:
    """Runs jobs, in a thread that lives from the first job until it is closed."""

    def __init__(self) -> None:
        self._events: Inbox[BucketJob | None] = Inbox()
        self._jobs: list[BucketJob] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failed: BaseException | None = None
        self._alarm: Alarm | None = None  # on which the thread sleeps

    def submit(
        self, steps: Steps, progress: Callable[[], None] = lambda: None, timing: Timing | None = None
    ) -> Future[None]:
        """Begin a job, after those submitted before it."""
        job = BucketJob(steps, progress, timing)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="echelon-codec", daemon=True)
            self._thread.start()
        self._put(job)
        return job.future

    def close(self) -> None:
        """End after the jobs in flight; they fail at once if their group is closed next."""
        self._closed = True
        self._put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _put(self, event: BucketJob | None) -> None:
        self._events.put(event)
        alarm = self._alarm
        if alarm is not None:
            alarm.ring_own()

    def _run(self) -> None:
        while not (self._closed and not self._jobs and self._events.empty()):
            silent = next((job for job in self._jobs if job.silent), None)
            # A thread that is in `Inbox.get` waits for work; watch.py looks at that.
            try:
                event = self._events.get() if silent is None else self._next_event(silent)
                if isinstance(event, BucketJob):
                    self._jobs.append(event)
                self._advance()
            except BaseException as error:  # noqa: BLE001 - a waiting thread must learn of any error
                self._failed = error
            if self._failed is not None:
                for job in self._jobs:
                    job.future.complete(error=self._failed)
                self._jobs = []

    def _next_event(self, silent: BucketJob) -> BucketJob | None:
        """Wait for a job, or until one can go on; `silent` is the oldest that nobody calls back for.

        Futures of shared memory call nobody back. This thread sleeps until another worker rings, or a job
        comes; one that takes long is waited for, which notices workers that are gone.
        """
        begun = time.monotonic()
        alarms = {id(job.awaited.alarm) for job in self._jobs if job.silent and job.awaited is not None}
        alarm = silent.awaited.alarm if silent.awaited is not None and len(alarms) == 1 else None
        while not self._some_can_resume():
            try:
                return self._next_within(alarm)
            except queue.Empty:
                if time.monotonic() - begun > _LONG_S:
                    self._wait_for(silent)
                    break
        return None

    def _next_within(self, alarm: Alarm | None) -> BucketJob | None:
        """Wait briefly for a job; raises queue.Empty if none comes, or the alarm rings before."""
        if alarm is None:
            return self._events.get_within(_LOOK_S)
        self._alarm = alarm
        try:
            alarm.sleep(_SLEEP_S, lambda: self._events.empty() and not self._some_can_resume())
        finally:
            self._alarm = None
        return self._events.get_within(0)

    def _some_can_resume(self) -> bool:
        before = None
        for job in self._jobs:
            if self._can_resume(job, before):
                return True
            before = job
        return False

    def _wait_for(self, job: BucketJob) -> None:
        assert job.awaited is not None
        try:
            job.awaited.wait()
        except Exception as error:  # noqa: BLE001 - a waiting thread must learn of any error
            job.steps.close()
            self._fail(job, error)

    def _advance(self) -> None:
        """Resume all jobs that can go on, the oldest first: each may let the next one go on."""
        before = None
        for job in list(self._jobs):
            while not job.future.done() and self._can_resume(job, before):
                self._resume(job)
            before = before if job.future.done() else job
        self._jobs = [job for job in self._jobs if not job.future.done()]

    def _can_resume(self, job: BucketJob, before: BucketJob | None) -> bool:
        if before is not None and before.stage <= job.stage:
            return False
        return job.awaited is None or job.awaited.done()

    def _resume(self, job: BucketJob) -> None:
        try:
            job.awaited = next(job.steps)
        except StopIteration:
            job.future.complete()
            return
        except GradientError as error:  # on all workers alike: later jobs go on
            job.future.complete(error=error)
            return
        except BaseException as error:  # noqa: BLE001 - a waiting thread must learn of any error
            self._fail(job, error)
            return
        job.stage += 1
        job.silent = not job.awaited.add_done_callback(lambda: self._put(None))

    def _fail(self, job: BucketJob, error: BaseException) -> None:
        """Fail this and all later jobs: peers would take a later exchange for this job's."""
        job.future.complete(error=error)
        self._failed = error
