"""The handle of an operation in flight, as torch.distributed's callers use it, with torch's own future."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.backend.failures import translated
from echelon.backend.order import Driver, Job

_NO_TIMEOUT = timedelta(0)


class BackendWork(dist.Work):
    """An operation of a process group. `ranks`: the members' global ranks, where they differ."""

    def __init__(self, job: Job, driver: Driver, ranks: Sequence[int] = ()) -> None:
        super().__init__()
        self._job = job
        self._driver = driver
        self._ranks = ranks
        self._future: torch.futures.Future[Any] | None = None
        self.source: Callable[[], int] | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Block until it is over; raises its error, or at the timeout, after which it goes on."""
        limit_s = timeout.total_seconds() if timeout > _NO_TIMEOUT else None
        if not self._driver.wait(self._job, limit_s):
            raise dist.DistBackendError(
                f"a timeout has passed: the operation was not over within {limit_s:g} s"
            )
        if self._job.error is not None:
            raise translated(self._job.error, self._ranks)
        return True

    def synchronize(self) -> None:
        """The same as `wait`: there are no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over; takes messages in that have arrived."""
        return self._driver.look(self._job)

    def is_success(self) -> bool:
        """Whether it is over without an error."""
        return self._job.done and self._job.error is None

    def exception(self) -> BaseException | None:
        """The error that ended it."""
        error = self._job.error
        return None if error is None else translated(error, self._ranks)

    def result(self) -> list[Tensor]:
        """The tensors with the result, once it is over."""
        return self._job.result

    def source_rank(self) -> int:
        """For a receive: the sender's rank in the group."""
        return -1 if self.source is None else self.source()

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """torch's future of the result. It is completed also if nobody waits."""
        if self._future is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            # Only an error that a callback raises reaches those who wait in C++, as DDP does.
            self._future = future.then(self._outcome)
            self._job.call_when_done(lambda: future.set_result(None))
            if not self._job.done:
                self._driver.hasten(self._job)
        return self._future

    get_future_result = get_future

    def _outcome(self, _: torch.futures.Future[Any]) -> list[Tensor]:
        if self._job.error is not None:
            raise translated(self._job.error, self._ranks)
        return self._job.result
