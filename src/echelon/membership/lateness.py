"""Which members hold the others up? By progress: how far their training threads are, never by heartbeats.

A member is late if others have arrived at a step and it has not, for longer than the limit:

    limit = patience * (median of the last rounds + K * 1.4826 * MAD), and at least the floor

A round is the time from one step to the next, as reports show it. A process that is stopped, one in an
endless loop and one that is cut off look alike: their counts stand still. A member is slow if a detector
(sync/detectors/) says so in several reports in a row, and diverging if its gradients are not finite in
several reports in a row, while the others' are.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from echelon.membership.messages import Evidence, Report
from echelon.membership.view import MemberId
from echelon.sync.detector import KEPT, Detector

K = 6.0
_DEVIATION = 1.4826
_IN_A_ROW = 3


def usual_round_s(rounds_s: Collection[float]) -> float:
    """What a round takes at most, unless something is wrong; 0 if none is known."""
    if not rounds_s:
        return 0.0
    centre = median(rounds_s)
    return centre + K * _DEVIATION * median([abs(one - centre) for one in rounds_s])


@dataclass(frozen=True, slots=True, kw_only=True)
class LatenessRules:
    """patience multiplies the limit; it is the knob. `first_s` is the limit until rounds are known."""

    patience: float = 4.0
    floor_s: float = 0.5
    first_s: float = 120.0
    detector: Detector | None = None


@dataclass(slots=True)
class _Track:
    """What is known of one member."""

    step: int = -1
    arrived: bool = False
    moved_at: float = 0.0
    compute_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    slow: int = 0
    bad: int = 0


class MemberProgress:
    """The progress of all members."""

    def __init__(self, rules: LatenessRules) -> None:
        self._rules = rules
        self._tracks: dict[MemberId, _Track] = defaultdict(_Track)
        self._rounds: deque[float] = deque(maxlen=KEPT)
        self._front = -1
        self._front_at = 0.0
        self._arrived_at: float | None = None

    @property
    def limit_s(self) -> float:
        """How long members wait for one that has not arrived."""
        if len(self._rounds) < _IN_A_ROW:
            return self._rules.first_s
        return max(self._rules.floor_s, self._rules.patience * usual_round_s(self._rounds))

    @property
    def front(self) -> int:
        """The last step that anybody reported as landed."""
        return self._front

    def begin(self, members: Sequence[MemberId], step: int, now: float) -> None:
        """A view begins at this step: nobody has arrived yet, and nobody is late."""
        for member in members:
            track = self._tracks[member]
            track.step, track.arrived, track.moved_at = step, False, now
            track.slow = track.bad = 0
        self._front, self._front_at, self._arrived_at = step, now, None

    def note(self, report: Report, now: float) -> bool:
        """A report of a member; whether its training thread has moved since the last one."""
        track = self._tracks[report.member]
        moved = (report.step, report.arrived) > (track.step, track.arrived)
        if moved:
            track.step, track.arrived, track.moved_at = report.step, report.arrived, now
        if report.step > self._front:
            self._rounds.append((now - self._front_at) / (report.step - self._front))
            self._front, self._front_at, self._arrived_at = report.step, now, None
        if moved and report.arrived and report.step == self._front and self._arrived_at is None:
            self._arrived_at = now
        if report.compute_s is not None and moved:
            self._judge(track, report)
        if moved:
            track.bad = 0 if report.finite else track.bad + 1
        return moved

    def late(self, members: Sequence[MemberId], now: float) -> list[MemberId]:
        """The members that others have waited for longer than the limit, though not for all of them."""
        if self._arrived_at is None or now - self._arrived_at <= self.limit_s:
            return []
        ahead = [m for m in members if self._at(m) >= (self._front, True)]
        behind = [m for m in members if self._at(m) < (self._front, True)]
        return behind if ahead else []

    def unwell(self, members: Sequence[MemberId]) -> dict[MemberId, Evidence]:
        """Slow and diverging members; never all of them."""
        found: dict[MemberId, Evidence] = {}
        for member in members:
            if self._tracks[member].bad >= _IN_A_ROW:
                found[member] = "diverging"
            elif self._tracks[member].slow >= _IN_A_ROW:
                found[member] = "slow"
        return found if len(found) < len(members) else {}

    def is_well(self, compute_s: float) -> bool:
        """Whether a worker that is out and computes a step in this time would keep up."""
        known = [median(track.compute_s) for track in self._tracks.values() if len(track.compute_s) >= 3]
        return not known or compute_s <= 2 * median(known)

    def _at(self, member: MemberId) -> tuple[int, bool]:
        track = self._tracks[member]
        return track.step, track.arrived

    def _judge(self, track: _Track, report: Report) -> None:
        """Compare a time with the member's bounds, then count it among its times."""
        detector = self._rules.detector
        if detector is not None and report.compute_s is not None:
            others = [list(one.compute_s) for one in self._tracks.values() if one is not track]
            own = list(track.compute_s)
            low, high = detector.shortest(own, others), detector.limit(own, others)
            normal = low <= report.compute_s <= high or not math.isfinite(report.compute_s)
            track.slow = 0 if normal else track.slow + 1
        if report.compute_s is not None:
            track.compute_s.append(report.compute_s)
