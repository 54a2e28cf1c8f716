"""When may a worker that was left out come back?

A worker that was stopped, cut off or stuck asks by itself once its training thread goes on, and is taken
back. One that was slow is taken back when it has computed a step in a normal time, several times in a row.
Each time that it was left out it waits twice as long as before, at most `MOST_S`.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.membership.messages import Evidence
from echelon.membership.view import MemberId

MOST_S = 60.0
_WELL_IN_A_ROW = 3


@dataclass(slots=True)
class _Absence:
    evidence: Evidence
    since: float
    times: int
    well: int = 0


class Readmission:
    """The workers that were left out, by slot."""

    def __init__(self, wait_s: float = 1.0) -> None:
        self._wait_s = wait_s
        self._absent: dict[tuple[str, int], _Absence] = {}

    def left_out(self, member: MemberId, evidence: Evidence, now: float) -> None:
        """A member was left out."""
        known = self._absent.get(member.place)
        times = known.times + 1 if known is not None else 1
        self._absent[member.place] = _Absence(evidence=evidence, since=now, times=times)

    def started_again(self, member: MemberId) -> None:
        """A new process has the slot; what was wrong with the old one does not matter."""
        self._absent.pop(member.place, None)

    def may_join(self, member: MemberId, well: bool | None, now: float) -> bool:
        """Whether it is taken back; `well` is None if it does not say how long it computes."""
        absence = self._absent.get(member.place)
        if absence is None:
            return True
        if well is not None:
            absence.well = absence.well + 1 if well else 0
        doubled = min(absence.times - 2, 30)  # 2.0 ** 1024 is an error
        wait_s = min(MOST_S, self._wait_s * 2.0**doubled) if absence.times > 1 else 0.0
        if now - absence.since < wait_s:
            return False
        return absence.evidence != "slow" or absence.well >= _WELL_IN_A_ROW
