"""Something that a group does together, as those who wait for it and the loop see it."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

from echelon.comm.connection import Connection
from echelon.comm.group import Timing
from echelon.errors import WorkerError

_MARGIN_S = 8.0


class Operation(ABC):
    """One collective on one worker. All methods but `wait` run in the loop's thread."""

    def __init__(self, tag: int, deadline_s: float) -> None:
        self.tag = tag
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.error: Exception | None = None
        self.timing = Timing()
        self._ended = threading.Event()
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
            if not self.ended:
                self.timing.ended = time.perf_counter()
                self.error = error
                self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Block until it is over, by success, failure or deadline."""
        # The loop ends it soon after the deadline; the margin is for a loop that is itself held up.
        if not self._ended.wait(max(0.0, self.deadline - time.monotonic()) + _MARGIN_S):
            raise WorkerError("the thread that moves bytes is stuck", fix="report this as a defect")
        if self.error is not None:
            raise self.error
