"""Something that a group does together, as those who wait for it and the loop see it."""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from echelon.comm.group import Timing
from echelon.comm.wire.connection import Connection
from echelon.errors import WorkerError

_MARGIN_S = 8.0
_log = logging.getLogger(__name__)


class Moment:
    """Something that happens once. Threads wait for it; callbacks are called once it has happened."""

    def __init__(self) -> None:
        self._past = threading.Event()
        self._door = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_past(self) -> bool:
        """Whether it has happened."""
        return self._past.is_set()

    def happen(self) -> None:
        """Now, unless it was before. Calls back in this thread; a callback that fails harms no other."""
        with self._door:
            self._past.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - it must not keep others from learning of the end
                _log.exception("what was to be called at the end of an operation failed")

    def tell(self, callback: Callable[[], None]) -> None:
        """Call back once: when it happens, or now if it has."""
        with self._door:
            if not self._past.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout_s: float) -> bool:
        """Block until it happens; False if it does not in time."""
        return self._past.wait(timeout_s)


class Operation(ABC):
    """One collective on one worker. All methods but `wait` and `tell` run in the loop's thread."""

    def __init__(self, tag: int, deadline_s: float) -> None:
        self.tag = tag
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.error: Exception | None = None
        self.timing = Timing()
        self._over = False
        self._ended = Moment()
        self._ending = threading.Lock()

    @abstractmethod
    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Queue the first messages."""

    @abstractmethod
    def needs(self, rank: int) -> bool:
        """Whether anything is still to go to that peer, or to come from it that has not come already."""

    @abstractmethod
    def awaited(self) -> set[int]:
        """Those without whom it cannot go on now."""

    def end(self, error: Exception | None = None) -> None:
        """It is over; what is said first counts."""
        with self._ending:
            if self._over:
                return
            self.timing.ended = self.timing.ended or time.perf_counter()
            self.error = error
            self._over = True
        self._ended.happen()

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._over

    def tell(self, callback: Callable[[], None]) -> bool:
        """Call back once, when there is a result or an error; at once if there is. Always possible: True.

        Called in the thread that moves bytes, so a callback must not block.
        """
        self._ended.tell(callback)
        return True

    def wait(self) -> None:
        """Block until it is over, by success, failure or deadline."""
        self._await(self._ended)
        if self.error is not None:
            raise self.error

    def _await(self, moment: Moment) -> None:
        # The loop ends it soon after the deadline; the margin is for a loop that is itself held up.
        if not moment.wait(max(0.0, self.deadline - time.monotonic()) + _MARGIN_S):
            raise WorkerError("the thread that moves bytes is stuck", fix="report this as a defect")
