"""The group of one: every operation is over before it begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group, Messages, Op, check_messages


class SoloGroup(Group):
    """A worker by itself."""

    rank = 0
    size = 1
    names: Mapping[int, str] = {0: "rank 0"}

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, priority: int = 0) -> Future[Tensor]:
        """A sum of one."""
        return Future.completed(tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """One copy."""
        return [tensor.clone()]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Nobody to tell."""

    def all_to_all(self, outgoing: Sequence[Tensor], *, priority: int = 0) -> Messages:
        """Nobody else to hear from."""
        check_messages(outgoing, self.size)
        return Messages(Future.completed(list(outgoing)), Future.completed(None))

    def fork(self) -> Group:
        """Nothing has an order here."""
        return self

    def close(self) -> None:
        """Nothing to let go of."""
