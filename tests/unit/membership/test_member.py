"""A member, one situation at a time: what it answers, and what it does in the next view."""

from __future__ import annotations

from uuid import UUID

import pytest

from echelon.membership.decision import decide
from echelon.membership.lateness import LatenessRules, MemberProgress
from echelon.membership.ledger import new_ledger, used_by
from echelon.membership.messages import Fence, Healing, NewView, Report, StepState
from echelon.membership.respawn import RespawnRule
from echelon.membership.view import MemberId, first_view
from echelon.membership.worker import MemberMachine

RUN = UUID(int=1)
A, B, C = MEMBERS = [MemberId("node", slot) for slot in range(3)]
VIEW = first_view(RUN, MEMBERS)
START = new_ledger(30, 6)
RECORD = NewView(view=VIEW, committed=0, ledger=START, how="draw")


def member(who=A):
    machine = MemberMachine(who)
    machine.install(RECORD)
    return machine


def second(how="draw", committed=0, sources=(), members=(A, B), ledger=START, parts=()):
    healing = [m for m, _ in sources]
    view = VIEW.follow(RUN, members, healing)
    return NewView(
        view=view, committed=committed, ledger=ledger, how=how, sources=tuple(sources), parts=tuple(parts)
    )


def test_an_answer_stays_as_it_was_though_the_training_thread_goes_on():
    machine = member()
    (answer,) = machine.fence(Fence(record=RECORD))
    assert answer.state.phase == "undrawn"
    machine.began()
    assert machine.fence(Fence(record=RECORD)) == [answer]


def test_a_member_in_the_middle_of_an_iteration_repeats_it_and_one_outside_draws():
    busy, idle = member(), member()
    busy.began()
    for machine in (busy, idle):
        machine.fence(Fence(record=RECORD))
    assert busy.install(second("repeat")).do == "repeat"
    assert idle.install(second("repeat")).do == "draw"


def test_a_member_that_holds_its_gradients_sends_them_again_with_the_new_weight():
    machine = member()
    machine.began()
    machine.fence(Fence(record=RECORD))
    parts = START.draw(VIEW.full)
    act = machine.install(second("reduce", parts=[(A, parts[A]), (B, parts[B])]))
    assert act.do == "reduce-again"
    assert machine.weight == 0.5


def test_while_it_is_fenced_a_member_becomes_neither_whole_nor_less_than_whole():
    machine = member()
    healing = Healing(source=B, base=0)
    machine.install(second(sources=[(A, healing)]))
    machine.fence(Fence(record=second(sources=[(A, healing)])))
    assert machine.received(0) == []
    assert machine.needs_state is False
    assert not machine.overwriting()
    other = member()
    other.fence(Fence(record=RECORD))
    assert not other.overwriting()
    assert other.state().holds == 0


def test_a_member_that_must_heal_forgets_a_state_that_is_newer_than_what_was_committed():
    machine = member()
    machine.landed()
    assert machine.holds == 1
    machine.install(second(committed=1, sources=[(A, Healing(source=B, base=1))]))
    assert machine.holds is None
    behind = member()
    behind.install(second(committed=1, sources=[(A, Healing(source=B, base=1))]))
    assert behind.holds == 0, "its old state stays until the new one is complete"


def test_a_member_that_missed_a_view_keeps_no_old_state():
    machine = member()
    later = second().view.follow(RUN, [A, B], [A])
    heal = ((A, Healing(source=B, base=4)),)
    machine.install(NewView(view=later, committed=4, ledger=START, how="draw", sources=heal))
    assert machine.holds is None


def test_a_transfer_goes_on_only_if_no_step_is_missing():
    heal = Healing(source=B, base=0)
    machine = member()
    assert machine.install(second(sources=[(A, heal)])).do == "heal"
    view = machine.view.follow(RUN, [A, B], [A])
    same = NewView(view=view, committed=0, ledger=START, how="draw", sources=((A, heal),))
    assert machine.install(same).do == "go-on"
    further = NewView(
        view=view.follow(RUN, [A, B], [A]), committed=3, ledger=START, how="draw", sources=((A, heal),)
    )
    assert machine.install(further).do == "heal"


def test_a_state_kept_from_an_earlier_step_holds_no_gradients_of_the_next_one():
    after = START.after(used_by(START.draw(VIEW.full)))
    kept = StepState(following=1, ledger=after, holds=0, held=START, phase="held")
    record = decide(RUN, VIEW, {A: kept, B: kept}, [])
    assert (record.committed, record.how) == (0, "repeat")


def test_new_members_come_in_one_order_whatever_the_order_of_joining():
    fresh = [MemberId("z", 1), MemberId("z", 0), MemberId("b", 3)]
    assert VIEW.follow(RUN, [*MEMBERS, *fresh]).members == (*MEMBERS, *sorted(fresh))
    assert VIEW.follow(RUN, [*fresh[::-1], *MEMBERS]).id == VIEW.follow(RUN, [*MEMBERS, *fresh]).id


@pytest.mark.parametrize(("drop_last", "first"), [(False, 8), (True, 6)])
def test_fewer_samples_than_members_join_the_batch_before_unless_they_are_dropped(drop_last, first):
    ledger = new_ledger(8, 6, drop_last=drop_last)
    spans = used_by(ledger.draw(MEMBERS))
    assert sum(stop - start for start, stop in spans) == first


def test_one_member_alone_never_makes_an_error_common():
    rule = RespawnRule()
    rule.failed(A, "ValueError: x", 0)
    assert rule.common([A]) == ""


def test_nobody_is_late_while_all_are_behind_and_never_are_all_unwell():
    progress = MemberProgress(LatenessRules(first_s=1.0))
    progress.begin(VIEW.members, 0, 0.0)
    gone = MemberId("gone", 0)
    progress.note(Report(member=gone, view=VIEW.id, step=0, arrived=True), 0.0)
    assert progress.late(VIEW.members, 100.0) == []
    for step in range(1, 9):
        for one in MEMBERS:
            progress.note(Report(member=one, view=VIEW.id, step=step, finite=False), float(step))
    assert progress.unwell(VIEW.members) == {}
