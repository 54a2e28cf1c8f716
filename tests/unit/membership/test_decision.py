"""What becomes of the step under way, case by case."""

from __future__ import annotations

from uuid import UUID

from echelon.membership.decision import decide
from echelon.membership.ledger import new_ledger, used_by
from echelon.membership.messages import StepState
from echelon.membership.view import MemberId, first_view

RUN = UUID(int=1)
A, B, C = (MemberId("node", slot) for slot in range(3))
VIEW = first_view(RUN, [A, B, C])
START = new_ledger(30, 6)
PARTS = START.draw(VIEW.full)
AFTER = START.after(used_by(PARTS))


def at(member, step=0, phase="held"):
    """A member after so many steps, 0 or 1."""
    ledger = AFTER if step else START
    return StepState(
        following=step, ledger=ledger, holds=step, phase=phase, part=ledger.draw(VIEW.full)[member]
    )


def test_a_step_that_landed_on_one_survivor_is_committed_and_the_other_receives_it():
    record = decide(RUN, VIEW, {A: at(A, 1, "undrawn"), B: at(B, 0, "partial")}, [])
    assert record.committed == 1
    assert record.view.full == (A,)
    assert dict(record.sources)[B].source == A
    assert record.how == "draw"
    assert record.ledger == AFTER


def test_held_gradients_are_reduced_again_without_the_lost_members_samples():
    record = decide(RUN, VIEW, {A: at(A), C: at(C)}, [])
    assert (record.committed, record.how) == (0, "reduce")
    assert dict(record.parts) == {A: PARTS[A], C: PARTS[C]}
    later = record.ledger.after(used_by(dict(record.parts)))
    assert PARTS[B][0][0] == later.open[0][0], "the lost member's samples are drawn next"


def test_a_half_summed_buffer_repeats_the_step_from_the_same_samples():
    record = decide(RUN, VIEW, {A: at(A), B: at(B, phase="partial")}, [])
    assert record.how == "repeat"
    again = record.ledger.draw(record.view.full)
    assert sorted(used_by(again)) == [(0, 3), (3, 6)]


def test_a_step_that_nobody_began_is_drawn():
    states = {A: at(A, phase="undrawn"), B: at(B, phase="undrawn")}
    assert decide(RUN, VIEW, states, []).how == "draw"


def test_a_new_member_comes_after_the_others_and_takes_part_with_weight_zero():
    early = MemberId("a-node", 0)
    record = decide(RUN, VIEW, {A: at(A), B: at(B), C: at(C)}, [early])
    assert record.view.members == (A, B, C, early)
    assert record.view.healing == (early,)
    assert early not in dict(record.parts)


def test_a_transfer_goes_on_in_the_next_view_if_no_step_is_missing():
    healing = decide(RUN, VIEW, {A: at(A), B: at(B)}, [C]).sources[0][1]
    states = {A: at(A), C: StepState(following=0, ledger=START, holds=None, healing=healing)}
    assert dict(decide(RUN, VIEW, states, []).sources)[C] == healing
