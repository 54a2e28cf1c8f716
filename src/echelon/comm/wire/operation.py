"""One operation of a group, as the loop carries it out; its future is what others wait for."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from echelon.comm.future import Future, Timing
from echelon.comm.wire import blame
from echelon.comm.wire.connection import Connection
from echelon.errors import WorkerError

if TYPE_CHECKING:
    from echelon.comm.wire.loop import Loop

T = TypeVar("T")
_MARGIN_S = 8.0


class Operation(ABC, Generic[T]):
    """One worker's part of an operation, with the result that its future gets.

    `begin`, `needs`, `awaited` and `end` run in the loop's thread.
    """

    def __init__(self, tag: int, deadline_s: float, result: T) -> None:
        self.tag = tag
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.timing = Timing()
        self.future: Future[T] = Future(self, self.timing)
        self.loop: Loop | None = None  # set when it is submitted
        self._result = result

    @abstractmethod
    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Queue the first messages."""

    @abstractmethod
    def needs(self, rank: int) -> bool:
        """Whether that peer has still to receive something, or to send something that has not arrived."""

    @abstractmethod
    def awaited(self) -> set[int]:
        """The peers without which it cannot go on now."""

    def end(self, error: BaseException | None = None) -> None:
        """Complete the future; the first call counts."""
        if not self.future.done():
            self.timing.ended = self.timing.ended or time.perf_counter()
            self.future.complete(self._result, error)

    @property
    def ended(self) -> bool:
        """Whether it is over, by success or failure."""
        return self.future.done()

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if any."""
        return self.future.error

    # For threads that wait for it ----------------------------------------------------------------

    def progress(self) -> None:
        """As the group of this loop does."""
        if self.loop is not None:
            self.loop.progress()

    def limit_s(self) -> float:
        """The loop ends it soon after the deadline; the margin is for a loop that is itself delayed."""
        return max(0.0, self.deadline - time.monotonic()) + _MARGIN_S

    def overdue(self, timeout_s: float | None) -> Exception:
        """Names the awaited workers; or the loop, if that has not ended the operation at its deadline."""
        if timeout_s is None or self.loop is None:
            return WorkerError("the thread that moves bytes is stuck", fix="report this as a defect")
        return blame.late(self.loop.names, sorted(self.awaited()), timeout_s, self.loop.me)
