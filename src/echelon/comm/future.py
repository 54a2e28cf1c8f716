"""A future: the result of an operation that is in flight, or the error that ended it.

Invariant: a thread makes progress for its peers before it blocks, and while it is blocked. A peer may need
this worker's part of an operation in shared memory before it can complete what this thread waits for.
`Future.wait` is where threads block, so it is the only place that must know this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from echelon.errors import RoundTimeout

T = TypeVar("T")
S = TypeVar("S")
_FOREVER = -1.0  # as a lock's timeout
LONG_S = 1.0  # after this, a wait is reported
_PROGRESS_S = 1e-3  # how often a blocked thread makes progress for others
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Timing:
    """When an operation was in flight, on the performance counter; zeros where the group does not know.

    `begun`: its first bytes could move. `sent`: this worker had handed over its last byte. `ended`: its
    result was there. `adding_s`: how long this worker computed sums.
    """

    begun: float = 0.0
    sent: float = 0.0
    ended: float = 0.0
    adding_s: float = 0.0


class Waiting(Protocol):
    """What a thread must know that waits for a future."""

    def progress(self) -> bool:
        """Before blocking: do this worker's part in what peers may wait for.

        Returns whether more will come; then the thread calls it again while it is blocked.
        """

    def limit_s(self) -> float | None:
        """How long to block at most; None if the operation certainly ends by itself."""

    def overdue(self, timeout_s: float | None) -> Exception:
        """The error after `timeout_s`, which names the awaited workers; None: after `limit_s`."""

    def stalled(self, waited_s: float, *, endless: bool) -> Callable[[], None] | None:
        """Report that the thread has been blocked so long; returns what ends the report, if there is any.

        Called again while the wait goes on. `endless`: nothing but the operation or its deadline ends it.
        """


class Alarm(Protocol):
    """What others ring when something may have become done that calls nobody back."""

    def sleep(self, seconds: float, asleep: Callable[[], object]) -> None:
        """Sleep until it rings, at most so long; not if `asleep` is false once others would ring."""

    def ring_own(self) -> None:
        """Wake the threads of this process that sleep."""


class Future(Generic[T]):
    """Completed once, by any thread, with a result or an error."""

    def __init__(self, waiting: Waiting | None = None, timing: Timing | None = None) -> None:
        self._timing = Timing() if timing is None else timing
        self._waiting = waiting
        self._completed = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._gate = threading.Lock()  # open once completed; far cheaper than an Event
        self._gate.acquire()

    @classmethod
    def completed(cls, result: T) -> Future[T]:
        """A future whose result is known already."""
        future = cls()
        future.complete(result)
        return future

    @property
    def timing(self) -> Timing:
        """How the operation went, once it is done."""
        return self._timing

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if any."""
        return self._error

    @property
    def alarm(self) -> Alarm | None:
        """Where to sleep until it may be done, if it calls nobody back."""
        return None

    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._completed

    def complete(self, result: T | None = None, error: BaseException | None = None) -> None:
        """End it with a result or an error; the first call counts. Runs callbacks in this thread."""
        with self._lock:
            if self._completed:
                return
            self._result, self._error = result, error
            self._waiting = None  # usually the operation itself, which holds tensors
            self._completed = True
            callbacks, self._callbacks = self._callbacks, []
        self._gate.release()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - the other callbacks must still run
                _log.exception("a callback of a future failed")

    def wait(self, timeout_s: float | None = None) -> T:
        """Block until it is done; returns the result or raises the error.

        Blocks at most until the group's deadline. With `timeout_s`, at most that long: RoundTimeout then
        names the awaited workers, and the operation stays in flight.
        """
        if not self._completed:
            waiting = self._waiting
            more = waiting is not None and waiting.progress()
            if not self._completed:
                self._block(waiting, timeout_s, more=more)
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def add_done_callback(self, callback: Callable[[], None]) -> bool:
        """Call back exactly once when it is done, or now if it is. The callback must not block.

        Returns False, and never calls back, if completion depends on the caller's own work; call `wait`
        instead.
        """
        with self._lock:
            if not self._completed:
                self._callbacks.append(callback)
                return True
        callback()
        return True

    def then(self, change: Callable[[T], S]) -> Future[S]:
        """The same operation with a last step on its result, which the first thread that waits runs."""
        changed = CallerFuture(
            lambda timeout_s: change(self.wait(timeout_s)),
            self.done,
            lambda: self.timing,
            self.add_done_callback,
            self.alarm,
        )
        changed._waiting = self._waiting
        return changed

    @staticmethod
    def all(futures: Sequence[Future[Any]], result: S) -> Future[S]:
        """One future of several: done when all are."""

        def wait(timeout_s: float | None) -> S:
            until = None if timeout_s is None else time.monotonic() + timeout_s
            for future in futures:
                future.wait(None if until is None else max(0.0, until - time.monotonic()))
            return result

        def subscribe(callback: Callable[[], None]) -> bool:
            left, lock = len(futures), threading.Lock()

            def one_less() -> None:
                nonlocal left
                with lock:
                    left -= 1
                    last = not left
                if last:
                    callback()

            return all(future.add_done_callback(one_less) for future in futures)

        return CallerFuture(
            wait,
            lambda: all(future.done() for future in futures),
            lambda: _joined([future.timing for future in futures]),
            subscribe,
            next((future.alarm for future in futures if future.alarm is not None), None),
        )

    def overdue(self, timeout_s: float | None) -> Exception:
        """The error for a thread that has waited so long."""
        waiting = self._waiting
        if waiting is not None:
            return waiting.overdue(timeout_s)
        return RoundTimeout(f"no result within {timeout_s or 0.0:g} s", fix="wait longer")

    def stalled(self, waited_s: float, *, endless: bool) -> Callable[[], None] | None:
        """A thread has been blocked for so long: report that, if there is anybody to report it to."""
        waiting = self._waiting
        return None if waiting is None else waiting.stalled(waited_s, endless=endless)

    def _block(self, waiting: Waiting | None, timeout_s: float | None, *, more: bool = False) -> None:
        limit_s = None if waiting is None else waiting.limit_s()
        if limit_s is not None and (timeout_s is None or limit_s < timeout_s):
            blocked_s, reported_s = limit_s, None
        else:
            blocked_s, reported_s = _FOREVER if timeout_s is None else timeout_s, timeout_s
        short = 0 <= blocked_s <= LONG_S
        if self._opens(waiting if more else None, blocked_s if short else LONG_S):
            return
        opened = not short and self._opens_within(blocked_s, waiting, endless=timeout_s is None)
        if not opened and not self._completed:
            raise self.overdue(reported_s) if waiting is None else waiting.overdue(reported_s)

    def _opens(self, waiting: Waiting | None, limit_s: float) -> bool:
        """Block at most so long, and make progress meanwhile where there is any to make."""
        until = time.monotonic() + limit_s
        while waiting is not None and waiting.progress():
            if self._gate.acquire(timeout=min(_PROGRESS_S, max(0.0, until - time.monotonic()))):
                self._gate.release()
                return True
            if time.monotonic() >= until:
                return False
        if self._gate.acquire(timeout=max(0.0, until - time.monotonic())):
            self._gate.release()
            return True
        return False

    def _opens_within(self, blocked_s: float, waiting: Waiting | None, *, endless: bool) -> bool:
        """Go on waiting, with reports; returns whether it is over in time."""
        waited_s, since, end = LONG_S, time.monotonic() - LONG_S, _nothing
        try:
            while blocked_s < 0 or waited_s < blocked_s:
                reported = None if waiting is None else waiting.stalled(waited_s, endless=endless)
                if reported is None:
                    end()
                end = reported or _nothing
                left_s = LONG_S if blocked_s < 0 else min(LONG_S, blocked_s - waited_s)
                if self._opens(waiting, left_s):
                    return True
                waited_s = time.monotonic() - since
            return False
        finally:
            end()


class CallerFuture(Future[T]):
    """A future that the thread that waits for it completes, by its own work.

    `work` gets the timeout of `wait`, which it ignores if it cannot stop halfway. `ready`: whether it would
    return or raise at once. `subscribe`: adds a callback for that, if another thread completes it; if none
    does, others may ring the `alarm`.
    """

    def __init__(
        self,
        work: Callable[[float | None], T],
        ready: Callable[[], bool],
        timing: Callable[[], Timing] = Timing,
        subscribe: Callable[[Callable[[], None]], bool] | None = None,
        alarm: Alarm | None = None,
    ) -> None:
        super().__init__(timing=_UNKNOWN)
        self._work = work
        self._ready = ready
        self._get_timing = timing
        self._subscribe = subscribe
        self._alarm = alarm

    @property
    def alarm(self) -> Alarm | None:
        """That of the work."""
        return self._alarm

    @property
    def timing(self) -> Timing:
        """That of the work."""
        return self._get_timing()

    def done(self) -> bool:
        """Whether the work is done, or takes no time."""
        return self._completed or self._ready()

    def wait(self, timeout_s: float | None = None) -> T:
        """Do the work. If it raises, the next call raises again."""
        if not self._completed:  # nobody blocks on its gate, nor is called back by it
            self._result = self._work(timeout_s)
            self._completed = True
        result: T = self._result
        return result

    def add_done_callback(self, callback: Callable[[], None]) -> bool:
        """Call back once if it is done, or if others complete what the work waits for; else False."""
        if self._subscribe is not None:
            return self._subscribe(callback)
        over = self.done()
        if over:
            callback()
        return over


def _nothing() -> None:
    """Ends a report that was not made."""


_UNKNOWN = Timing()


def _joined(parts: Sequence[Timing]) -> Timing:
    """The timing of several parts of one operation."""
    return Timing(
        begun=min(part.begun for part in parts),
        sent=max(part.sent for part in parts),
        ended=max(part.ended for part in parts),
        adding_s=sum(part.adding_s for part in parts),
    )
