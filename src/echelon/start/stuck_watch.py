"""Which workers hold the others up now? Reads how far each is, and whether its process is stopped.

What it means is decided in membership/stuck.py; for workers that are slow, in membership/slow.py.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from echelon.membership.slow import SlowRule, SlowWorker
from echelon.membership.stuck import LateWorker, StuckRule
from echelon.start.member_board import MemberBoard

_PART_OF_TIMEOUT = 0.8  # the launcher decides before the workers' own deadlines end the run


class StuckWatch:
    """The workers of one run.

    limit_s  their own deadline
    slow     which of them are too slow; None if nobody is left out for that
    """

    def __init__(self, board: MemberBoard, limit_s: float, slow: SlowRule | None = None) -> None:
        self._board = board
        self._slow = slow
        self._rule = StuckRule(_PART_OF_TIMEOUT * limit_s)

    def late(self, members: Collection[int]) -> list[LateWorker]:
        """The members that hold the others up; nobody while it is not known how far all are."""
        if not self._board.is_current:
            return []
        seen = {slot: found for slot in members if (found := self._board.read(slot)) is not None}
        self._rule.look(seen, time.monotonic())
        return self._rule.late(self._board.stopped(seen) if self._rule.suspects else [])

    def slow(self, members: Collection[int]) -> list[SlowWorker]:
        """The members without which the others are faster."""
        if self._slow is None:
            return []
        seen = {slot: found for slot in members if (found := self._board.read(slot)) is not None}
        cycles = {slot: one.cycles for slot, one in seen.items() if one.cycles is not None}
        return self._slow.look(cycles, time.monotonic())

    def is_well(self, slot: int, cycle_s: float, share: int, members: Sequence[int]) -> bool:
        """Whether a worker that is out may come back."""
        return self._slow is not None and self._slow.is_well(
            slot, cycle_s, share, members, time.monotonic()
        )

    def begins_anew(self, slot: int) -> None:
        """A member was left out, or one that was out is a member again."""
        if self._slow is not None:
            self._slow.out(slot)

    def ended(self, slot: int) -> None:
        """The slot's process has ended."""
        self._board.clear(slot)
        if self._slow is not None:
            self._slow.forget(slot)

    def rounds(self, slot: int) -> int:
        """How many rounds the slot's process has taken part in."""
        found = self._board.read(slot)
        return found.rounds if found is not None else 0
