"""Which workers hold the others up now? Reads how far each is, and whether its process is stopped.

What it means is decided in membership/stuck.py.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from echelon.membership.stuck import LateWorker, StuckRule
from echelon.start.member_board import MemberBoard

_PART_OF_TIMEOUT = 0.8  # the launcher decides before the workers' own deadlines end the run


class StuckWatch:
    """The workers of one run. `limit_s`: their own deadline."""

    def __init__(self, board: MemberBoard, limit_s: float) -> None:
        self._board = board
        self._rule = StuckRule(_PART_OF_TIMEOUT * limit_s)

    def late(self, members: Collection[int]) -> list[LateWorker]:
        """The members that hold the others up; nobody while it is not known how far all are."""
        if not self._board.is_current:
            return []
        seen = {slot: found for slot in members if (found := self._board.read(slot)) is not None}
        self._rule.look(seen, time.monotonic())
        return self._rule.late(self._board.stopped(seen) if self._rule.suspects else [])

    def rounds(self, slot: int) -> int:
        """How many rounds the slot's process has taken part in."""
        found = self._board.read(slot)
        return found.rounds if found is not None else 0
