"""Members that others wait for, through any course of looks, moves, stops and pauses."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.membership.stuck import BATCH_FLOOR_S, STOPPED_FLOOR_S, StuckRule, WorkerSeen, WorkPhase

LONGEST_S = 60.0
LOOK_S = 0.25

phases = st.sampled_from(list(WorkPhase))


class Course:
    """A rule, its members, and the time."""

    def __init__(self, members: int) -> None:
        self.rule = StuckRule(LONGEST_S)
        self.now = 0.0
        self.seen = {slot: WorkerSeen(operation=1, phase=WorkPhase.ELSEWHERE) for slot in range(members)}
        self.stopped: set[int] = set()

    def put(self, slot, operation=None, phase=None, rounds=None, batches=None):
        before = self.seen[slot]
        self.seen[slot] = WorkerSeen(
            operation=before.operation if operation is None else operation,
            phase=before.phase if phase is None else phase,
            rounds=before.rounds if rounds is None else rounds,
            batches=before.batches if batches is None else batches,
        )

    def look(self, after_s=LOOK_S):
        self.now += after_s
        self.rule.look(self.seen, self.now)
        return self.rule.late(self.stopped if self.rule.suspects else ())

    def look_for(self, seconds):
        found = []
        for _ in range(round(seconds / LOOK_S)):
            found += self.look()
        return found

    def step_all(self, times, round_s=LOOK_S):
        """All members take steps together."""
        for _ in range(times):
            for slot, one in self.seen.items():
                self.put(slot, one.operation + 1, WorkPhase.BATCH, one.rounds + 1, one.batches + 1)
            assert not self.look_for(round_s)


@given(
    members=st.integers(2, 6),
    moves=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 3), phases, st.booleans(), st.floats(0.0, 40.0)),
        max_size=60,
    ),
)
def test_whoever_waits_and_is_not_stopped_is_never_late_and_never_are_all(members, moves):
    course = Course(members)
    for slot, further, phase, stops, after_s in moves:
        slot %= members
        course.put(slot, course.seen[slot].operation + further, phase, course.seen[slot].rounds + further)
        (course.stopped.add if stops else course.stopped.discard)(slot)
        found = {one.slot for one in course.look(after_s)}
        waiting = {at for at, one in course.seen.items() if one.phase is WorkPhase.WAITING}
        assert not found & (waiting - course.stopped)
        assert not found or waiting - course.stopped, "somebody waits for those that are late"
        assert len(found) < members


@given(members=st.integers(2, 6), stuck=st.integers(0, 5), phase=phases, stopped=st.booleans())
def test_whoever_does_not_come_is_late_in_the_end_and_nobody_else_is(members, stuck, phase, stopped):
    course, stuck = Course(members), stuck % members
    course.step_all(10)
    for slot, one in course.seen.items():
        course.put(slot, one.operation + (slot != stuck), WorkPhase.WAITING if slot != stuck else phase)
    course.stopped = {stuck} if stopped else set()
    found = course.look_for(LONGEST_S + 5)
    expected = {stuck} if stopped or phase is not WorkPhase.WAITING else set()
    assert {one.slot for one in found} == expected
    assert all(one.stopped is stopped for one in found)


@given(members=st.integers(2, 6), steps=st.integers(1, 8), round_s=st.floats(1.0, 9.0))
def test_nobody_is_late_if_all_take_their_time(members, steps, round_s):
    course = Course(members)
    course.step_all(10)
    for _ in range(steps):
        for slot in range(members - 1):  # all but one arrive, then the last one does
            course.put(slot, course.seen[slot].operation + 1, WorkPhase.WAITING)
        course.put(members - 1, phase=WorkPhase.BATCH)
        assert not course.look_for(round_s)
        course.put(members - 1, course.seen[members - 1].operation + 1, WorkPhase.WAITING)
        course.step_all(1)


@given(phase=phases, stopped=st.booleans(), pauses=st.lists(st.floats(60.0, 5000.0), max_size=3))
def test_time_in_which_nobody_looked_does_not_count(phase, stopped, pauses):
    course = Course(3)
    course.step_all(10)
    course.put(1, course.seen[1].operation + 1, WorkPhase.WAITING)
    course.put(0, phase=phase)
    course.stopped = {0} if stopped else set()
    for pause_s in pauses:
        assert not course.look(pause_s)


def test_a_stopped_worker_is_late_soon_one_that_computes_later_others_last():
    limits = {}
    for name in ("stopped", "batch", "elsewhere"):
        course = Course(3)
        course.step_all(10)
        for slot in (1, 2):
            course.put(slot, course.seen[slot].operation + 1, WorkPhase.WAITING)
        course.put(0, phase=WorkPhase.BATCH if name == "batch" else WorkPhase.ELSEWHERE)
        course.stopped = {0} if name == "stopped" else set()
        course.look()
        limits[name] = course.rule.limit_s(0)
        while not (found := course.look()):
            assert course.now < 200
        if name == "stopped":
            assert str(found[0]).endswith(" s (stopped)")
    assert limits["batch"] == BATCH_FLOOR_S
    assert limits["elsewhere"] == LONGEST_S
    assert course.rule.limit_s(0) >= STOPPED_FLOOR_S


def test_limits_follow_the_rounds():
    course = Course(2)
    course.step_all(20, round_s=8.0)
    course.put(1, course.seen[1].operation + 1, WorkPhase.WAITING)
    assert not course.look_for(BATCH_FLOOR_S + 2), "rounds of 8 s: one of 12 s is nothing"
    assert [one.slot for one in course.look_for(14)][:1] == [0]


def test_first_steps_and_steps_that_go_on_are_not_late():
    course = Course(2)
    course.put(1, 2, WorkPhase.WAITING)
    course.put(0, phase=WorkPhase.BATCH)
    assert not course.look_for(LONGEST_S - 2), "nothing is known of rounds yet"
    course = Course(2)
    course.step_all(10)
    course.put(1, course.seen[1].operation + 1, WorkPhase.WAITING)
    for _ in range(6):  # it accumulates over several batches, while the other one waits
        course.put(0, batches=course.seen[0].batches + 1)
        assert not course.look_for(BATCH_FLOOR_S - 2)


def test_a_change_of_members_begins_all_waits_anew():
    course = Course(3)
    course.step_all(10)
    for slot in (1, 2):
        course.put(slot, course.seen[slot].operation + 1, WorkPhase.WAITING)
    assert not course.look_for(BATCH_FLOOR_S - 1)
    del course.seen[2]
    assert not course.look_for(BATCH_FLOOR_S - 1)
