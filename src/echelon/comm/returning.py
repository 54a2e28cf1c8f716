"""The group of a worker that was started again and is no member yet: it has nobody to exchange with.

It has the rank and size that the lost worker had. What the members exchanged before they trained is
repeated from a log (train/changes.py), so none of its operations is ever carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group, Op
from echelon.errors import WorkerError


class ReturningGroup(Group):
    """Rank and size, and no operations."""

    own_transport = True

    def __init__(self, rank: int, size: int, names: Mapping[int, str], deadline_s: float) -> None:
        self.rank, self.size, self.names, self.deadline_s = rank, size, names, deadline_s

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """There is nobody."""
        self._refuse()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """There is nobody."""
        self._refuse()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """There is nobody."""
        self._refuse()

    def fork(self) -> Group:
        """The group itself: it has no order of operations."""
        return self

    def close(self) -> None:
        """Nothing to close."""

    def _refuse(self) -> NoReturn:
        raise WorkerError(
            "a worker that was started again exchanges something before it is a member",
            where=str(self.names[self.rank]),
            fix="exchange values only with session methods, and train in session.epochs(n)",
        )
