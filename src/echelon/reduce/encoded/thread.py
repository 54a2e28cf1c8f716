"""The thread that encodes and decodes beside backward, and carries buckets from stage to stage.

A job is a generator: it starts an exchange, yields it, and is resumed when that is over. Jobs go through
their stages in the order in which they were submitted, on every worker: job k enters a stage after job k-1
has. So exchanges of a stage, which have a group of their own, begin in the same order everywhere.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator
from typing import Any

from echelon.comm.future import Future, Timing
from echelon.errors import GradientError

Steps = Generator[Future[Any], None, None]


class BucketJob:
    """One bucket's way through its stages; `progress` is that of its group."""

    def __init__(self, steps: Steps, progress: Callable[[], None], timing: Timing | None) -> None:
        self.steps = steps
        self.stage = 0
        self.awaited: Future[Any] | None = None
        self.future: Future[None] = Future(self, timing)
        self._progress = progress

    def progress(self) -> None:
        """As its group does."""
        self._progress()

    def limit_s(self) -> None:
        """None: every exchange has a deadline of its own."""

    def overdue(self, timeout_s: float | None) -> Exception:
        """Names those whom the current exchange awaits."""
        return (self.awaited or Future[Any]()).overdue(timeout_s)


class CodecThread:
    """Runs jobs, in a thread that lives from the first one until it is closed."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[BucketJob | None] = queue.SimpleQueue()
        self._jobs: list[BucketJob] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failed: BaseException | None = None

    def submit(
        self, steps: Steps, progress: Callable[[], None] = lambda: None, timing: Timing | None = None
    ) -> Future[None]:
        """Begin a job, after those that were submitted before it."""
        job = BucketJob(steps, progress, timing)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="echelon-codec", daemon=True)
            self._thread.start()
        self._events.put(job)
        return job.future

    def close(self) -> None:
        """End when the jobs under way have; they fail at once if their group is closed next."""
        self._closed = True
        self._events.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not (self._closed and not self._jobs and self._events.empty()):
            event = self._events.get()
            if isinstance(event, BucketJob):
                self._jobs.append(event)
            try:
                self._advance()
            except BaseException as error:  # noqa: BLE001 - nobody may wait for ever
                self._failed = error
            if self._failed is not None:
                for job in self._jobs:
                    job.future.complete(error=self._failed)
                self._jobs = []

    def _advance(self) -> None:
        """Resume whatever can be, the oldest first: each job may let the next one pass."""
        before = None
        for job in list(self._jobs):
            while not job.future.done() and self._may_go(job, before):
                self._resume(job)
            before = before if job.future.done() else job
        self._jobs = [job for job in self._jobs if not job.future.done()]

    def _may_go(self, job: BucketJob, before: BucketJob | None) -> bool:
        if before is not None and before.stage <= job.stage:
            return False
        return job.awaited is None or job.awaited.done()

    def _resume(self, job: BucketJob) -> None:
        try:
            job.awaited = next(job.steps)
        except StopIteration:
            job.future.complete()
            return
        except GradientError as error:  # of all workers alike: later jobs go on
            job.future.complete(error=error)
            return
        except BaseException as error:  # noqa: BLE001 - whoever waits for the job must learn of it
            self._fail(job, error)
            return
        job.stage += 1
        if not job.awaited.add_done_callback(lambda: self._events.put(None)):
            try:
                job.awaited.wait()
            except Exception as error:  # noqa: BLE001
                job.steps.close()
                self._fail(job, error)

    def _fail(self, job: BucketJob, error: BaseException) -> None:
        """This worker is out of step with the others: what it began later would be taken for this job's."""
        job.future.complete(error=error)
        self._failed = error
