"""Respawning, readmission, lateness, and what a member does."""

from __future__ import annotations

from uuid import UUID

import pytest

from echelon.membership.lateness import LatenessRules, MemberProgress
from echelon.membership.ledger import new_ledger, used_by
from echelon.membership.messages import Fence, NewView, Report
from echelon.membership.readmission import MOST_S, Readmission
from echelon.membership.respawn import RespawnRule
from echelon.membership.view import MemberId, first_view
from echelon.membership.worker import MemberMachine
from echelon.sync.detectors.absolute import Absolute

A, B, C = (MemberId("node", slot) for slot in range(3))
VIEW = first_view(UUID(int=1), [A, B, C])
RECORD = NewView(view=VIEW, committed=0, ledger=new_ledger(30, 6), how="draw")


def report(member, step, **told):
    return Report(member=member, view=VIEW.id, step=step, **told)


def test_a_worker_that_is_killed_now_and_then_is_always_started_again():
    rule = RespawnRule(tries=2)
    for _ in range(20):
        rule.failed(A, "", 0)
        assert not rule.refusal(A)
        rule.progressed(A)


def test_a_worker_that_never_takes_part_is_left_out_after_its_tries():
    rule = RespawnRule(tries=2)
    for _ in range(3):
        rule.failed(A, "", 0)
    assert "3 times" in rule.refusal(A)


def test_a_worker_that_raises_the_same_error_twice_is_left_out():
    rule = RespawnRule(tries=9)
    rule.failed(A, "ValueError: x", 0)
    rule.progressed(A)
    assert not rule.refusal(A)
    rule.failed(A, "ValueError: x", 5)
    assert "ValueError: x" in rule.refusal(A)


def test_a_worker_that_is_stuck_again_and_again_is_left_out_for_good():
    rule = RespawnRule(tries=2)
    for _ in range(20):
        rule.left_out(A, rounds=500)
        assert not rule.refusal(A), "it was well in between"
    for _ in range(2):
        rule.left_out(A, rounds=3)
        rule.progressed(A)
    assert "left out 3 times" in rule.refusal(A)
    assert not rule.refusal(B)


def test_an_error_that_most_members_raise_is_the_scripts():
    rule = RespawnRule()
    rule.failed(A, "ValueError: x", 0)
    assert not rule.common([A, B, C])
    rule.failed(B, "ValueError: x", 0)
    assert rule.common([A, B, C]) == "ValueError: x"


def test_a_worker_that_is_left_out_often_waits_longer_each_time():
    rule = Readmission(wait_s=1.0)
    rule.left_out(A, "late", 0.0)
    assert rule.may_join(A, None, 0.0)
    for _ in range(2000):
        rule.left_out(A, "late", 0.0)
    assert not rule.may_join(A, None, MOST_S - 1)
    assert rule.may_join(A, None, MOST_S)


def test_a_slow_worker_returns_after_several_normal_steps():
    rule = Readmission()
    rule.left_out(A, "slow", 0.0)
    assert [rule.may_join(A, well, 1.0) for well in (True, False, True, True, True)] == [False] * 4 + [True]


def test_a_member_whose_count_stands_still_is_late_and_the_others_are_not():
    progress = MemberProgress(LatenessRules(floor_s=0.5))
    progress.begin(VIEW.members, 0, 0.0)
    for step in range(1, 11):
        for member in VIEW.members:
            progress.note(report(member, step), step * 0.1)
    assert progress.limit_s == 0.5
    for t in (1.05, 2.0):  # reports go on, counts do not
        for member in VIEW.members:
            progress.note(report(member, 10, arrived=member != C), t)
    assert progress.late(VIEW.members, 1.5) == []
    assert progress.late(VIEW.members, 2.0) == [C]


def test_nobody_is_late_if_nobody_has_arrived():
    progress = MemberProgress(LatenessRules(first_s=1.0))
    progress.begin(VIEW.members, 0, 0.0)
    assert progress.late(VIEW.members, 100.0) == []


def test_algorithm_3_finds_workers_that_are_slower_and_workers_that_are_faster():
    detector = Absolute(threshold=0.2)
    assert detector.limit([1.0, 1.2], ()) == pytest.approx(1.3)
    assert detector.shortest([1.0, 1.2], ()) == pytest.approx(0.9)
    for found, compute_s in (("slow", 3.0), ("slow", 0.1), (None, 1.1)):
        progress = MemberProgress(LatenessRules(detector=Absolute(threshold=0.5)))
        progress.begin(VIEW.members, 0, 0.0)
        for step in range(1, 30):
            for member in VIEW.members:
                own = compute_s if member == C and step >= 27 else 1.0
                progress.note(report(member, step, compute_s=own), step)
        assert progress.unwell(VIEW.members).get(C) == found


def test_a_fenced_member_lets_nothing_land_and_repeats_its_answer():
    machine = MemberMachine(A)
    machine.install(RECORD)
    machine.began()
    first = machine.fence(Fence(record=RECORD))
    assert not machine.may_send
    with pytest.raises(RuntimeError, match="fenced"):
        machine.landed()
    assert machine.fence(Fence(record=RECORD)) == first


def test_a_member_that_was_left_out_ignores_the_view_it_was_in():
    machine = MemberMachine(A)
    machine.install(RECORD)
    assert machine.left_out(2)
    assert machine.install(RECORD) is None
    assert machine.fence(Fence(record=RECORD)) == []


def test_a_ledger_refuses_samples_that_are_not_open():
    ledger = new_ledger(10, 4)
    parts = ledger.draw([A, B])
    with pytest.raises(ValueError, match="not open"):
        ledger.after(used_by(parts)).after(used_by(parts))
