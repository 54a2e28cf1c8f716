"""Which members are too slow to be worth waiting for, and which of those that are out are well again? Pure.

A cycle is a worker's own time from batch to batch: data, computing, and what the script does besides;
waiting for others is not in it. A detector (sync/detector.py) gives each worker's longest and shortest
normal cycle, from the last cycles of all members. A worker outside of them is abnormal. It is left out if
the others are faster without it, too:

    with it     the longest cycle of all members
    without it  the longest cycle of the others, once they have its samples as well

A cycle is taken to be in proportion to its samples. Where shares follow speeds (`adapts`), both are those
of the best shares, so a worker that is only slower gets a smaller share and stays. It has to be so for
`IN_A_ROW` looks in a row with a new cycle each, and for `LEAST_S` seconds.

A worker that is out is well once the same rule would not leave it out, as often and as long. What it takes
while it is out does not count among its own past cycles.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from echelon.config.units import show_seconds
from echelon.plan.shares import split
from echelon.sync.detector import KEPT, Detector

NOBODY = "none"  # in place of a detector: nobody is left out
IN_A_ROW = 3
LEAST_S = 1.0
_GAIN = 1.1  # so much faster the others have to be without a worker
_RECENT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycles:
    """How many cycles a worker has made, the seconds of all of them, and the samples of the last one."""

    count: int
    total_s: float
    share: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """A member that is left out because the others are faster without it."""

    slot: int
    cycle_s: float
    limit_s: float
    without_s: float

    def __str__(self) -> str:
        cycle, limit, without = map(show_seconds, (self.cycle_s, self.limit_s, self.without_s))
        return f"a step took it {cycle}, at most {limit} is normal; the others need {without} without it"


@dataclass(slots=True)
class _CycleTrack:
    """What is known of one worker. `since`: when it began to be abnormal, or well if it is out."""

    cycles_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    seen: Cycles | None = None
    share: int = 0
    cycle_s: float = 0.0
    in_a_row: int = 0
    since: float = 0.0

    def note(self, found: bool, now: float) -> bool:
        """Whether it has been found so often and so long in a row."""
        if not found:
            self.in_a_row = 0
            return False
        if not self.in_a_row:
            self.since = now
        self.in_a_row += 1
        return self.in_a_row >= IN_A_ROW and now - self.since >= LEAST_S


class SlowRule:
    """The cycles of one run's workers. `adapts`: shares follow the workers' speeds."""

    def __init__(self, detector: Detector, *, adapts: bool) -> None:
        self._detector = detector
        self._adapts = adapts
        self._tracks: dict[int, _CycleTrack] = defaultdict(_CycleTrack)

    def look(self, seen: Mapping[int, Cycles], now: float) -> list[SlowWorker]:
        """The members as they are now, by slot; those that are to be left out."""
        fresh: dict[int, float] = {}
        for slot, cycles in seen.items():
            track = self._tracks[slot]
            before, track.seen = track.seen, cycles
            if before is None or cycles.count <= before.count:
                continue  # it has made no cycle, or is another process now
            track.cycle_s = (cycles.total_s - before.total_s) / (cycles.count - before.count)
            track.share = cycles.share
            if track.share > 0 and track.cycle_s > 0:
                fresh[slot] = track.cycle_s
        found = []
        for slot, cycle_s in fresh.items():
            track = self._tracks[slot]
            judged = self._judged(slot, cycle_s, track.share, list(seen))
            if track.note(judged is not None, now) and judged is not None:
                found.append(judged)
        for slot, cycle_s in fresh.items():
            self._tracks[slot].cycles_s.append(cycle_s)
        return found

    def is_well(self, slot: int, cycle_s: float, share: int, members: Sequence[int], now: float) -> bool:
        """Whether a worker that is out, and takes so long for so many samples, may come back."""
        if share <= 0 or cycle_s <= 0:
            return False
        well = self._judged(slot, cycle_s, share, members) is None
        return self._tracks[slot].note(well, now)

    def out(self, slot: int) -> None:
        """A member was left out, or a worker that was out is a member: its count begins anew."""
        self._tracks[slot].in_a_row = 0
        self._tracks[slot].seen = None

    def forget(self, slot: int) -> None:
        """The slot has another process, or none."""
        self._tracks.pop(slot, None)

    def _judged(self, slot: int, cycle_s: float, share: int, members: Sequence[int]) -> SlowWorker | None:
        """The worker as one that is to be left out; None if it is not."""
        others = [one for one in members if one != slot and self._tracks[one].cycles_s]
        if not others:
            return None
        own = self._tracks[slot].cycles_s
        past = [list(self._tracks[one].cycles_s) for one in others]
        times: list[Sequence[float]] = [list(own), *past] if own else [[cycle_s], *past]
        limit_s = self._detector.limits(times)[0]
        shortest_s = self._detector.shortest(times[0], past)
        if shortest_s <= cycle_s <= limit_s:
            return None
        with_s, without_s = self._with_and_without(cycle_s, share, others)
        if without_s * _GAIN >= with_s:
            return None
        return SlowWorker(slot=slot, cycle_s=cycle_s, limit_s=limit_s, without_s=without_s)

    def _with_and_without(self, cycle_s: float, share: int, others: Sequence[int]) -> tuple[float, float]:
        """How long a step takes with a worker, and without it."""
        shares = [self._tracks[one].share for one in others]
        usual_s = [self._usual_s(one) for one in others]
        speeds = [count / time_s for count, time_s in zip(shares, usual_s, strict=True)]
        batch = share + sum(shares)
        without_s = self._longest_s(batch, speeds)
        if not self._adapts:
            return max(cycle_s, *usual_s), without_s
        return self._longest_s(batch, [share / cycle_s, *speeds]), without_s

    def _longest_s(self, batch: int, speeds: Sequence[float]) -> float:
        """The longest cycle of workers with these speeds, in samples per second, for a batch."""
        if batch < len(speeds) or not all(math.isfinite(one) and one > 0 for one in speeds):
            return math.inf
        shares = split(batch, speeds if self._adapts else [1.0] * len(speeds))
        return max(count / speed for count, speed in zip(shares, speeds, strict=True))

    def _usual_s(self, slot: int) -> float:
        return median(list(self._tracks[slot].cycles_s)[-_RECENT:])
