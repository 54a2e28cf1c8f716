"""Which members are stuck, though others wait for them? Pure: what is seen of the members in, names out.

A member is late if another one waits in an operation that it has not come to, and it has not moved
itself meanwhile, for longer than the limit. The limit follows from what it was doing, with `r` for the
median of the last rounds plus K * 1.4826 * MAD:

    stopped (SIGSTOP), whatever it was doing    r, at least 3 s
    computing a batch, after its first steps    3 r, at least 10 s
    anything else                               the longest limit

"Anything else" is what one worker may do alone for long: its first steps, an evaluation, a file that only
the leader writes. No limit is above the longest one. A member that waits itself is never late unless it is
stopped.

Time counts only while somebody looks: if all of a machine was suspended, nobody was late meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import IntEnum

from echelon.membership.lateness import usual_round_s
from echelon.membership.slow import Cycles

STOPPED_FLOOR_S = 3.0
BATCH_FLOOR_S = 10.0
_BATCH_ROUNDS = 3.0
_FIRST_ROUNDS = 5
_KEPT_ROUNDS = 50
_LONGEST_LOOK_S = 0.5
_LOOKS_AFTER_S = 0.5


class WorkPhase(IntEnum):
    """What a worker's training thread is doing."""

    ELSEWHERE = 0
    WAITING = 1  # in an operation of all members
    BATCH = 2  # it has got a batch to train with, and computes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSeen:
    """How far a worker is: the operation it is in or was in last, its batches, rounds and cycles."""

    operation: int
    phase: WorkPhase
    batches: int = 0
    rounds: int = 0
    cycles: Cycles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LateWorker:
    """A member that holds the others up. `still_s`: for how long it has not moved."""

    slot: int
    still_s: float
    stopped: bool

    def __str__(self) -> str:
        return f"no progress for {self.still_s:.1f} s" + (" (stopped)" if self.stopped else "")


@dataclass(slots=True)
class _Course:
    """What is known of one member; times are on the clock of `StuckRule`."""

    seen: WorkerSeen
    moved_at: float
    entered_at: float
    stopped_at: float | None = None


class StuckRule:
    """The members of one run. `longest_s`: no member is awaited for longer."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._courses: dict[int, _Course] = {}
        self._rounds: deque[float] = deque(maxlen=_KEPT_ROUNDS)
        self._front = self._front_at = 0.0
        self._clock = 0.0
        self._looked_at: float | None = None

    def look(self, seen: Mapping[int, WorkerSeen], now: float) -> None:
        """The members as they are now, by slot. If they are others than before, all waits begin anew."""
        if self._looked_at is not None:
            self._clock += min(max(now - self._looked_at, 0.0), _LONGEST_LOOK_S)
        self._looked_at = now
        if seen.keys() != self._courses.keys():
            self._courses = {slot: _Course(one, self._clock, self._clock) for slot, one in seen.items()}
            self._front = max((one.rounds for one in seen.values()), default=0)
            self._front_at = self._clock
            return
        for slot, one in seen.items():
            course = self._courses[slot]
            if one == course.seen:
                continue
            course.seen, course.moved_at = one, self._clock
            if one.phase is WorkPhase.WAITING:
                course.entered_at = self._clock
        front = max((one.rounds for one in seen.values()), default=0)
        if front > self._front:
            self._rounds.append((self._clock - self._front_at) / (front - self._front))
            self._front, self._front_at = front, self._clock

    @property
    def suspects(self) -> bool:
        """Whether somebody has waited so long that it matters which members are stopped."""
        return any(self._clock - one.entered_at > _LOOKS_AFTER_S for one in self._waiting(()))

    def late(self, stopped: Collection[int]) -> list[LateWorker]:
        """The members that hold others up; `stopped` are those whose processes are stopped now."""
        found = []
        waiting = self._waiting(stopped)
        for slot, course in self._courses.items():
            self._note_stop(course, stopped=slot in stopped)
            if course.stopped_at is None and course.seen.phase is WorkPhase.WAITING:
                continue
            since = [
                one.entered_at
                for one in waiting
                if course.stopped_at is not None or one.seen.operation > course.seen.operation
            ]
            if not since:
                continue
            alone_at = course.moved_at if course.stopped_at is None else course.stopped_at
            held_up_s = self._clock - max(min(since), alone_at)
            if held_up_s > self.limit_s(slot):
                still_s, is_stopped = self._clock - course.moved_at, course.stopped_at is not None
                found.append(LateWorker(slot=slot, still_s=still_s, stopped=is_stopped))
        return found

    def limit_s(self, slot: int) -> float:
        """For how long others wait for a member that does what it is doing now."""
        course = self._courses[slot]
        usual_s = usual_round_s(self._rounds)
        limit_s = self._longest_s
        if course.stopped_at is not None:
            limit_s = max(STOPPED_FLOOR_S, usual_s)
        elif course.seen.phase is WorkPhase.BATCH and self._is_in_step(course):
            limit_s = max(BATCH_FLOOR_S, _BATCH_ROUNDS * usual_s)
        return min(limit_s, self._longest_s)

    def _is_in_step(self, course: _Course) -> bool:
        return course.seen.rounds >= _FIRST_ROUNDS and len(self._rounds) >= _FIRST_ROUNDS

    def _waiting(self, stopped: Collection[int]) -> list[_Course]:
        return [
            course
            for slot, course in self._courses.items()
            if course.seen.phase is WorkPhase.WAITING and slot not in stopped
        ]

    def _note_stop(self, course: _Course, *, stopped: bool) -> None:
        if stopped and course.stopped_at is None:
            course.stopped_at = self._clock
        elif not stopped and course.stopped_at is not None:
            course.stopped_at = None
            course.moved_at = course.entered_at = self._clock
