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
