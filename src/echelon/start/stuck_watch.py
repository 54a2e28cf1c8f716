"""Which workers hold the others up now? Reads how far each is, and whether its process is stopped.

What it means is decided in membership/stuck.py; for workers that are slow, in membership/slow.py.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from echelon.membership.slow import SlowRule, SlowWorker
from echelon.membership.stuck import LateWorker, StuckRule
from echelon.train.progress import PROGRESS_VARIABLE, ProgressTable

_PART_OF_TIMEOUT = 0.8  # the launcher decides before the workers' own deadlines end the run


class StuckWatch:
    """The workers of one run on this machine.

    limit_s  their own deadline
    slow     which of them are too slow; None if nobody is to be left out for that
    """

    def __init__(self, file: Path, limit_s: float, slow: SlowRule | None = None) -> None:
        self.table = ProgressTable(file)
        self._slow = slow
        self._rule = StuckRule(_PART_OF_TIMEOUT * limit_s)

    @property
    def environment(self) -> dict[str, str]:
        """What workers need to find the table."""
        return {PROGRESS_VARIABLE: str(self.table.file)}

    def late(self, members: Collection[int]) -> list[LateWorker]:
        """The members that hold the others up."""
        read = {slot: found for slot in members if (found := self.table.read(slot)) is not None}
        self._rule.look({slot: seen for slot, (_, seen) in read.items()}, time.monotonic())
        stopped = []
        if self._rule.suspects:
            stopped = [slot for slot, (process, _) in read.items() if _is_stopped(process)]
        return self._rule.late(stopped)

    def slow(self, members: Collection[int]) -> list[SlowWorker]:
        """The members without which the others are faster."""
        if self._slow is None:
            return []
        seen = {slot: found for slot in members if (found := self.table.cycles(slot)) is not None}
        return self._slow.look(seen, time.monotonic())

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
        self.table.clear(slot)
        if self._slow is not None:
            self._slow.forget(slot)

    def rounds(self, slot: int) -> int:
        """How many rounds the slot's process has taken part in."""
        found = self.table.read(slot)
        return found[1].rounds if found is not None else 0

    def close(self) -> None:
        """Nobody reads the table any more."""
        self.table.remove()


def _is_stopped(process: int) -> bool:
    try:
        return bool(psutil.Process(process).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
