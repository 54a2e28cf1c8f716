"""Who goes on after a loss, and from which operation."""

from __future__ import annotations

from echelon.membership.survival import Survival, SurvivorState


def ready(workers=4, fewest=2):
    survival = Survival(workers, fewest)
    for slot in range(workers):
        survival.ready(slot)
    return survival


def state(slot, operation=5, view=0, **handed):
    return SurvivorState(slot=slot, view=view, operation=operation, handed=handed.get("handed", {}))


def test_the_next_view_waits_until_all_survivors_have_said_where_they_are():
    survival = ready()
    assert survival.lose(2)
    for slot in (0, 1):
        survival.stand(state(slot))
        assert survival.follow() is None
    survival.stand(state(3, operation=6))
    view = survival.follow()
    assert (view.number, view.members, view.lost) == (1, (0, 1, 3), (2,))
    assert list(view.behind) == [5]
    assert view.source(5) == 2, "the third member has completed it"


def test_nobody_goes_on_before_all_are_ready_or_with_too_few():
    early = Survival(4, 2)
    early.ready(0)
    assert not early.lose(3)
    survival = ready(fewest=3)
    assert survival.lose(3)
    assert not survival.lose(2)
    assert survival.gone == {3}


def test_a_loss_while_survivors_meet_again_is_another_view():
    survival = ready()
    survival.lose(3)
    for slot in (0, 1, 2):
        survival.stand(state(slot))
    assert survival.follow().number == 1
    assert survival.follow() is None
    survival.lose(0)
    survival.stand(state(1, view=0))  # of the view before
    survival.stand(state(1, view=1))
    assert survival.follow() is None
    survival.stand(state(2, view=1))
    assert survival.follow().members == (1, 2)


def test_a_worker_that_has_ended_in_order_is_neither_awaited_nor_lost():
    survival = ready()
    survival.left(0)
    survival.lose(3)
    survival.stand(state(1))
    survival.stand(state(2))
    assert survival.follow().members == (1, 2)
    assert not survival.lose(0)


def test_batches_are_counted_as_on_the_worker_that_is_furthest():
    survival = ready()
    survival.lose(1)
    survival.stand(state(0, handed={0: 7, 1: 2}))
    survival.stand(state(2, handed={0: 8, 1: 2}))
    survival.stand(state(3, handed={0: 7, 1: 2}))
    assert survival.follow().handed == {0: 8, 1: 2}


def lost_and_gone_on(survival):
    survival.lose(2)
    for slot in (0, 1, 3):
        survival.stand(state(slot))
    assert survival.follow().members == (0, 1, 3)


def admitting(slot, view=1, operation=9):
    return SurvivorState(slot=slot, view=view, operation=operation, admits=True)


def test_a_worker_that_comes_back_is_admitted_when_all_members_stand_between_two_steps():
    survival = ready()
    lost_and_gone_on(survival)
    survival.wait(2)
    for slot in (0, 1):
        survival.stand(admitting(slot))
        assert survival.follow() is None
    survival.stand(admitting(3))
    view = survival.follow()
    assert (view.members, view.joined, view.lost) == ((0, 1, 3, 2), (2,), ())
    assert view.operations == (9, 9, 9, 9)
    assert not list(view.behind)
    assert survival.gone == frozenset()
    assert survival.lose(2), "it can be lost again"


def test_a_loss_comes_before_a_return():
    survival = ready(fewest=1)
    lost_and_gone_on(survival)
    survival.wait(2)
    survival.stand(admitting(0))
    survival.lose(3)
    survival.stand(state(1, view=1, operation=8))
    view = survival.follow()
    assert (view.members, view.joined, view.lost) == ((0, 1), (), (3,))
    assert list(view.behind) == [8], "the first member gives the other one what it lacks"
    for slot in (0, 1):
        survival.stand(admitting(slot, view=2))
    assert survival.follow().members == (0, 1, 2)


def test_members_go_on_if_the_worker_that_came_back_is_lost_while_they_stand():
    survival = ready()
    lost_and_gone_on(survival)
    survival.wait(2)
    survival.stand(admitting(0))
    survival.give_up(2)
    for slot in (1, 3):
        survival.stand(admitting(slot))
    view = survival.follow()
    assert (view.members, view.joined, view.lost) == ((0, 1, 3), (), ())


def test_members_leave_when_all_stand_between_two_steps_and_are_not_lost():
    survival = ready()
    survival.leave(0)
    assert survival.leaving == (0,)
    for slot in (0, 1, 2):
        survival.stand(admitting(slot, view=0))
        assert survival.follow() is None
    survival.stand(admitting(3, view=0))
    view = survival.follow()
    assert (view.members, view.left, view.lost, view.planned) == ((1, 2, 3), (0,), (), True)
    assert view.operations == (9, 9, 9)
    assert survival.leaving == ()
    assert not survival.broken


def test_so_many_stay_as_are_needed():
    survival = ready(fewest=3)
    assert survival.may_leave([1])
    assert not survival.may_leave([1, 2])
    survival.leave(1)
    assert not survival.may_leave([2])
    survival.lose(3)
    for slot in (0, 1, 2):
        survival.stand(state(slot))
    view = survival.follow()
    assert (view.members, view.left, view.planned) == ((0, 1, 2), (), False), "a loss comes first"
    for slot in (0, 1, 2):
        survival.stand(admitting(slot))
    assert survival.follow().members == (0, 1, 2), "too few would be left by now"
    assert survival.leaving == ()


def test_a_further_worker_joins_as_one_that_comes_back_and_can_be_lost_then():
    survival = ready()
    survival.expect(4)
    assert not survival.broken
    assert survival.gone == {4}
    survival.wait(4)
    for slot in range(4):
        survival.stand(admitting(slot, view=0))
    view = survival.follow()
    assert (view.members, view.joined) == ((0, 1, 2, 3, 4), (4,))
    assert survival.gone == frozenset()
    assert survival.lose(4)


def damaged(slot, operation, view):
    return SurvivorState(slot=slot, view=view, operation=operation, damage="a frame" if slot == 1 else "")


def test_after_a_damaged_message_all_members_meet_again_but_not_for_ever():
    survival = ready(workers=3)
    survival.wait(2)
    for turn in range(3):
        for slot in (0, 1):
            survival.stand(damaged(slot, 5 + turn, turn))
            assert survival.follow() is None
        survival.stand(damaged(2, 6 + turn, turn))
        view = survival.follow()
        assert (view.number, view.members, view.lost, view.joined) == (turn + 1, (0, 1, 2), (), ())
        assert (view.damage, view.planned, view.source(5 + turn)) == ("a frame", False, 2)
    for slot in range(3):
        survival.stand(damaged(slot, 9, 3))
    assert survival.follow() is None
    assert survival.follow() is None


def test_a_connection_that_was_lost_without_a_loss_is_no_reason_to_meet_again():
    survival = ready(workers=2)
    for slot in range(2):
        survival.stand(state(slot))
    assert survival.follow() is None


def test_a_member_that_is_left_out_may_wait_to_come_back():
    survival = ready()
    survival.leave(2, comes_back=True)
    survival.leave(3)
    for slot in range(4):
        survival.stand(SurvivorState(slot=slot, view=0, operation=5, admits=True))
    view = survival.follow()
    assert (view.members, view.left, view.out) == ((0, 1), (2, 3), (2,))
    assert survival.gone == {2}
    survival.wait(2)
    for slot in (0, 1):
        survival.stand(SurvivorState(slot=slot, view=1, operation=9, admits=True))
    view = survival.follow()
    assert (view.members, view.joined) == ((0, 1, 2), (2,))
