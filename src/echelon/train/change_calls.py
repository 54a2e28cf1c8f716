"""When are a script's functions told that members have changed? Between two steps, on all members alike.

After a loss members may be one operation apart. So the functions are called when the loop asks for a batch
after the last operation that any of them was at: all come by that place, and a function may exchange values
with the other members. If members change between two steps, all stand there: it is called at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from echelon.membership.survival import SurvivorView


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChange:
    """What a function gets that `session.on_change` was given.

    lost, left, joined  workers by the rank with which they were started, which they keep in lines and logs
    rank, world_size    this worker's index among those that are there now, and how many these are
    step                how many steps the optimizer has taken
    """

    lost: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    rank: int
    world_size: int
    step: int


@dataclass(slots=True)
class _Pending:
    """A change that the functions were not told of: after which operation they are, and who it is about."""

    operation: int
    lost: tuple[int, ...]
    left: tuple[int, ...]
    joined: tuple[int, ...]


class ChangeCalls:
    """The functions of one worker's script, and the changes that they are still to be told of."""

    def __init__(self) -> None:
        self._functions: list[Callable[[MembersChange], object]] = []
        self._pending: list[_Pending] = []

    def add(self, function: Callable[[MembersChange], object]) -> None:
        """Tell this function, too."""
        self._functions.append(function)

    def changed(self, view: SurvivorView) -> None:
        """Members have changed to those of this view."""
        change = _Pending(max(view.operations, default=0), view.lost, view.left, view.joined)
        if view.planned:  # all stand at one place: what was pending is told here, too
            before, self._pending = self._pending, []
            change.operation = 0
            change.lost = (*(slot for one in before for slot in one.lost), *change.lost)
        self._pending.append(change)

    def call(self, operation: int, *, rank: int, world_size: int, step: int) -> None:
        """The loop asks for a batch, after this operation: tell what is due."""
        while self._pending and self._pending[0].operation <= operation:
            due = self._pending.pop(0)
            told = MembersChange(
                lost=due.lost,
                left=due.left,
                joined=due.joined,
                rank=rank,
                world_size=world_size,
                step=step,
            )
            for function in self._functions:
                function(told)
