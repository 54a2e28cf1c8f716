"""When is a script told that members have changed?"""

from __future__ import annotations

from echelon.membership.survival import SurvivorView
from echelon.train.change_calls import ChangeCalls


def told_of(calls):
    told = []
    calls.add(lambda change: told.append((change.lost, change.joined, change.rank, change.step)))
    return told


def loss(*slots, operations=(5, 6)):
    return SurvivorView(number=1, members=(0, 1), operations=operations, lost=slots)


def test_members_are_told_after_the_operation_of_the_one_that_is_furthest():
    calls = ChangeCalls()
    told = told_of(calls)
    calls.changed(loss(2))
    calls.call(5, rank=1, world_size=2, step=3)
    assert not told, "another member is at operation 6 already, and was not told before it"
    calls.call(6, rank=1, world_size=2, step=4)
    calls.call(7, rank=1, world_size=2, step=5)
    assert told == [((2,), (), 1, 4)]


def test_two_losses_are_told_one_after_the_other():
    calls = ChangeCalls()
    told = told_of(calls)
    calls.changed(loss(2))
    calls.changed(loss(3, operations=(8, 8)))
    calls.call(6, rank=0, world_size=2, step=3)
    assert [lost for lost, *_ in told] == [(2,)]
    calls.call(8, rank=0, world_size=2, step=4)
    assert [lost for lost, *_ in told] == [(2,), (3,)]


def test_a_change_between_two_steps_is_told_at_once_with_the_loss_before_it():
    calls = ChangeCalls()
    told = told_of(calls)
    calls.changed(loss(2, operations=(9, 9)))
    calls.changed(
        SurvivorView(number=2, members=(0, 1, 2), operations=(9, 9, 9), joined=(2,), planned=True)
    )
    calls.call(8, rank=0, world_size=3, step=3)
    assert told == [((2,), (2,), 0, 3)]


def test_without_a_function_nothing_is_kept():
    calls = ChangeCalls()
    calls.changed(loss(2))
    calls.call(6, rank=0, world_size=2, step=3)
    told = told_of(calls)
    calls.call(7, rank=0, world_size=2, step=4)
    assert not told
