"""The group of a worker that runs alone: every operation is done at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group, Messages, Op, check_messages


class SoloGroup(Group):
    """A group of one worker."""

    rank = 0
    size = 1
    names: Mapping[int, str] = {0: "rank 0"}

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """Nothing to combine with."""
        return Future.completed(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """A copy."""
        return [tensor.clone()]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Nobody to send to."""

    def all_to_all(self, outgoing: Sequence[Tensor], *, priority: int = 0) -> Messages:
        """Only the message to itself."""
        check_messages(outgoing, self.size)
        return Messages(Future.completed(list(outgoing)), Future.completed(None))

    def fork(self) -> Group:
        """The group itself: it has no order of operations."""
        return self

    def close(self) -> None:
        """Nothing to close."""
