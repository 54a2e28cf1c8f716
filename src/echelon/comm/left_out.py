"""The group of a worker that is left out for a while: its operations go as if all members had its values.

So its script goes on, and what its steps take can be seen. Nothing of what it computes counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group, Op


class LeftOutGroup(Group):
    """Rank and size of the last members, of whom all have the values of this worker."""

    own_transport = True

    def __init__(self, rank: int, size: int, names: Mapping[int, str], deadline_s: float) -> None:
        self.rank, self.size, self.names, self.deadline_s = rank, size, names, deadline_s

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """So many times the value, for a sum."""
        if op == "sum":
            tensor.detach().mul_(self.size)
        return Future.completed(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Copies."""
        return [tensor.clone() for _ in range(self.size)]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """It is this worker's."""

    def fork(self) -> Group:
        """The group itself: it has no order of operations."""
        return self

    def close(self) -> None:
        """Nothing to close."""
