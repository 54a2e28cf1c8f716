"""The coordinator, one situation at a time: who is told what, and when."""

from __future__ import annotations

from uuid import UUID

import pytest

from echelon.membership.ledger import new_ledger, used_by
from echelon.membership.log import MemoryLog, ViewDecided
from echelon.membership.machine import MembershipCoordinator, MembershipRules
from echelon.membership.messages import (
    Accuse,
    Announce,
    Ended,
    Exited,
    Fence,
    Fenced,
    Healed,
    Installed,
    Join,
    LeaveOut,
    Leaving,
    NewView,
    Report,
    Respawn,
    StepState,
    Stop,
)
from echelon.membership.view import MemberId

RUN = UUID(int=1)
A, B, C, D = MEMBERS = [MemberId("node", slot) for slot in range(4)]
START = new_ledger(40, 8)


def told(instructions, member, kind):
    """What a member is told, of one kind."""
    return [
        i[1] for i in instructions if isinstance(i, tuple) and i[0] == member and isinstance(i[1], kind)
    ]


def of(instructions, kind):
    return [i for i in instructions if isinstance(i, kind)]


def standing(member, view, step=0, phase="held", **more):
    """A member's answer to a fence after so many steps."""
    ledger = START
    for _ in range(step):
        ledger = ledger.after(used_by(ledger.draw(view.full)))
    more = {"holds": step, **more}
    state = StepState(
        following=step, ledger=ledger, phase=phase, part=ledger.draw(view.full).get(member, ()), **more
    )
    return Fenced(member=member, view=view.id, state=state)


def running(log=None, **rules):
    """A coordinator of four members in their first view, at time 0."""
    coordinator = MembershipCoordinator(RUN, MembershipRules(workers=4, **rules), log or MemoryLog(), START)
    coordinator.tick(0.0)
    for member in MEMBERS:
        last = coordinator.handle(Join(member=member), 0.0)
    assert [told(last, m, NewView)[0].view.members for m in MEMBERS] == [tuple(MEMBERS)] * 4
    for member in MEMBERS:
        coordinator.handle(Installed(member=member, view=coordinator.view.id), 0.0)
    return coordinator


def answer_all(coordinator, members, now, **state):
    view = coordinator.view
    last = []
    for member in members:
        last = coordinator.handle(standing(member, view, **state), now)
    return last


def test_a_death_fences_the_others_at_once_and_the_next_view_waits_for_every_answer():
    coordinator = running()
    first = coordinator.handle(Exited(member=D, signal=9), 1.0)
    assert [told(first, m, Fence)[0].after for m in (A, B, C)] == [None] * 3
    assert not told(first, D, Fence)
    assert not of(answer_all(coordinator, [A, B], 1.0), NewView)
    assert coordinator.is_fencing
    last = answer_all(coordinator, [C], 1.0)
    assert [told(last, m, NewView)[0].view.members for m in (A, B, C)] == [(A, B, C)] * 3
    assert told(last, A, NewView)[0].view.number == 2
    lost = of(last, Announce)
    assert [(one.kind, one.member) for one in lost] == [("lost", D)]


def test_a_view_is_in_the_log_before_anybody_is_told():
    seen = []

    class Watched(MemoryLog):
        def append(self, entry):
            seen.append(entry)
            if isinstance(entry, ViewDecided) and entry.record.view.number == 2:
                raise OSError("disk full")
            super().append(entry)

    coordinator = running(Watched())
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    with pytest.raises(OSError, match="disk full"):
        answer_all(coordinator, [A, B, C], 1.0)
    assert coordinator.view.number == 1, "a view that is not in the log is nobody's"


def test_a_coordinator_that_starts_again_fences_the_last_view_and_repeats_no_incarnation():
    log = MemoryLog()
    before = running(log)
    again = of(before.handle(Exited(member=D, signal=9), 1.0), Respawn)
    assert [one.member for one in again] == [MemberId("node", 3, 1)]
    after = MembershipCoordinator(RUN, MembershipRules(workers=4), log, START)
    assert after.view == before.view
    assert told(after.tick(5.0), A, Fence)
    late = after.handle(Join(member=D), 5.0)
    assert not of(late, Respawn)
    third = of(after.handle(Exited(member=MemberId("node", 3, 1), signal=9), 5.0), Respawn)
    assert [one.member.incarnation for one in third] == [2]


def test_a_member_that_does_not_answer_in_time_is_left_out_and_one_that_answers_late_stays():
    coordinator = running(fence_s=1.0, min_workers=1)
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    answer_all(coordinator, [A], 1.1)
    assert coordinator.is_fencing
    coordinator.tick(1.9)
    assert coordinator.is_fencing, "B and C have until 2.0"
    last = coordinator.tick(2.1)
    assert told(last, A, NewView)[0].view.members == (A,)
    assert told(last, B, LeaveOut)
    kinds = {one.member: one.kind for one in of(last, Announce)}
    assert kinds == {B: "lost", C: "lost", D: "lost"}


def test_too_few_members_wait_fenced_and_go_on_when_enough_are_back():
    coordinator = running(min_workers=3, wait_s=10.0)
    coordinator.handle(Exited(member=C, signal=9), 1.0)
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    last = answer_all(coordinator, [A, B], 1.0)
    assert [one.kind for one in of(last, Announce)] == ["waiting"]
    assert coordinator.view.number == 1
    back = MemberId("node", 2, 1)
    last = coordinator.handle(Join(member=back), 5.0)
    assert told(last, A, NewView)[0].view.members == (A, B, back)
    assert told(last, A, NewView)[0].view.healing == (back,)


def test_too_few_members_for_too_long_end_the_run_with_a_checkpoint():
    coordinator = running(min_workers=3, wait_s=10.0, respawn=0)
    coordinator.handle(Exited(member=C, signal=9), 1.0)
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    answer_all(coordinator, [A, B], 1.0)
    assert not of(coordinator.tick(10.9), Ended)
    last = coordinator.tick(11.1)
    assert "2 workers are left, 3 are needed" in of(last, Ended)[0].reason
    assert told(last, A, Stop)[0].checkpoint
    assert coordinator.tick(12.0) == []


def test_half_of_the_workers_rounded_up_is_enough_unless_told():
    assert [MembershipRules(workers=n).fewest for n in (1, 2, 3, 4, 5, 8)] == [1, 1, 2, 2, 3, 4]
    assert MembershipRules(workers=8, min_workers=7).fewest == 7


def test_a_join_waits_for_the_end_of_a_step_and_a_death_meanwhile_does_not():
    coordinator = running()
    for member in MEMBERS:
        coordinator.handle(Report(member=member, view=coordinator.view.id, step=5), 1.0)
    new = MemberId("other", 0)
    first = coordinator.handle(Join(member=new), 1.0)
    assert [told(first, m, Fence)[0].after for m in MEMBERS] == [7] * 4
    later = coordinator.handle(Exited(member=D, signal=9), 1.1)
    assert [told(later, m, Fence)[0].after for m in (A, B, C)] == [None] * 3


def test_a_member_that_leaves_in_order_is_heard_and_is_not_in_the_next_view():
    coordinator = running()
    first = coordinator.handle(Leaving(member=B), 1.0)
    assert told(first, B, Fence)[0].after == 2
    last = answer_all(coordinator, MEMBERS, 1.0, step=2, phase="undrawn")
    assert told(last, A, NewView)[0].view.members == (A, C, D)
    assert told(last, B, LeaveOut)
    assert [one.kind for one in of(last, Announce)] == ["left"]


def test_one_that_leaves_with_the_only_newest_state_gives_it_away_first():
    coordinator = running()
    coordinator.handle(Leaving(member=B), 1.0)
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    view = coordinator.view
    coordinator.handle(standing(A, view, 0), 1.0)
    coordinator.handle(standing(B, view, 1, "undrawn"), 1.0)
    record = told(coordinator.handle(standing(C, view, 0), 1.0), A, NewView)[0]
    assert record.view.members == (A, B, C)
    assert record.committed == 1
    assert {m: heal.source for m, heal in record.sources} == {A: B, C: B}


def test_members_that_accuse_each_other_again_before_any_step_lose_the_most_accused():
    coordinator = running(respawn=0)
    coordinator.handle(Report(member=A, view=coordinator.view.id, step=1), 0.5)
    for turn in (1.0, 2.0):
        assert C in coordinator.view
        view = coordinator.view
        coordinator.handle(Accuse(member=A, view=view.id, whom=C), turn)
        coordinator.handle(Accuse(member=B, view=view.id, whom=C), turn)
        coordinator.handle(Accuse(member=C, view=view.id, whom=A), turn)
        last = answer_all(coordinator, MEMBERS, turn, step=1)
    assert told(last, A, NewView)[0].view.members == (A, B, D)
    assert told(last, C, LeaveOut)


def test_a_healed_member_becomes_full_at_the_end_of_a_step():
    coordinator = running()
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    back = MemberId("node", 3, 1)
    coordinator.handle(Join(member=back), 1.0)
    last = answer_all(coordinator, [A, B, C], 1.0)
    view = told(last, back, NewView)[0].view
    assert view.healing == (back,)
    first = coordinator.handle(Healed(member=back, view=view.id), 2.0)
    assert told(first, A, Fence)[0].after is not None
    last = answer_all(coordinator, [A, B, C, back], 2.0, step=2, phase="undrawn")
    assert told(last, A, NewView)[0].view.healing == ()
    assert [(one.kind, one.member) for one in of(last, Announce)] == [("back", back)]


def test_an_error_on_most_members_ends_the_run_with_it_and_one_error_does_not():
    coordinator = running()
    one = coordinator.handle(Exited(member=A, failure="ValueError: x"), 1.0)
    assert not of(one, Ended)
    assert of(one, Respawn)
    coordinator.handle(Exited(member=B, failure="ValueError: x"), 1.0)
    last = coordinator.handle(Exited(member=C, failure="ValueError: x"), 1.0)
    assert of(last, Ended)[0].reason == "ValueError: x"
    assert coordinator.ended


def test_an_answer_of_another_view_changes_nothing_and_is_corrected():
    coordinator = running()
    old = coordinator.view
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    answer_all(coordinator, [A, B, C], 1.0)
    last = coordinator.handle(standing(A, old), 2.0)
    assert told(last, A, NewView)[0].view == coordinator.view
    assert not coordinator.is_fencing
    stray = coordinator.handle(standing(D, old), 2.0)
    assert told(stray, D, LeaveOut)


def test_the_first_answer_of_a_member_counts_and_a_second_one_does_not():
    coordinator = running()
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    view = coordinator.view
    coordinator.handle(standing(A, view, 1, "undrawn"), 1.0)
    coordinator.handle(standing(A, view, 0), 1.0)
    coordinator.handle(standing(B, view, 0), 1.0)
    record = told(coordinator.handle(standing(C, view, 0), 1.0), A, NewView)[0]
    assert record.committed == 1


def test_a_member_without_a_whole_state_never_decides_the_step():
    coordinator = running()
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    view = coordinator.view
    coordinator.handle(standing(A, view, 2, "undrawn", holds=None), 1.0)
    coordinator.handle(standing(B, view, 1, "undrawn"), 1.0)
    record = told(coordinator.handle(standing(C, view, 1, "undrawn"), 1.0), A, NewView)[0]
    assert record.committed == 1
    assert record.view.full == (B, C)


def test_what_is_not_answered_is_said_again_and_nothing_else_is():
    coordinator = running(resend_s=0.1)
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    answer_all(coordinator, [A], 1.0)
    assert coordinator.tick(1.05) == []
    again = coordinator.tick(1.2)
    assert told(again, B, Fence)
    assert told(again, C, Fence)
    assert not told(again, A, Fence)


def test_a_silent_member_that_answers_before_the_decision_stays():
    coordinator = running(fence_s=1.0, min_workers=4, respawn=0)
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    answer_all(coordinator, [A, B], 1.0)
    assert [one.kind for one in of(coordinator.tick(2.5), Announce)] == ["waiting"]
    answer_all(coordinator, [C], 3.0)
    record = told(coordinator.handle(Join(member=MemberId("other", 0)), 3.0), A, NewView)[0]
    assert record.view.members == (A, B, C, MemberId("other", 0))


def test_an_earlier_process_of_a_slot_is_neither_taken_back_nor_counted_again():
    coordinator = running()
    coordinator.handle(Exited(member=D, signal=9), 1.0)
    answer_all(coordinator, [A, B, C], 1.0)
    assert not of(coordinator.handle(Exited(member=D, signal=9), 1.5), Respawn)
    late = coordinator.handle(Join(member=D), 2.0)
    assert told(late, D, LeaveOut)[0].reason == "a later process has its slot"
