"""The executor of schedules that property tests rely on: it finds what is wrong with a schedule."""

from __future__ import annotations

import pytest

from echelon.comm.schedule.collective import Move, ScheduleStep
from schedules import Broken, execute

BOTH = pytest.mark.parametrize("hold", [True, False])


def _give(peer, start=0, stop=2):
    return ScheduleStep(sends=(Move(peer, start, stop),))


def _take(peer, start=0, stop=2):
    return ScheduleStep(takes=(Move(peer, start, stop),))


@BOTH
def test_step_sends_the_buffer_as_it_was_when_the_step_began(hold):
    all_to_all = [
        [ScheduleStep(sends=(Move(1 - rank, 0, 2),), takes=(Move(1 - rank, 0, 2),))] for rank in (0, 1)
    ]
    assert execute(all_to_all, [[1, 2], [3, 4]], hold=hold) == [[3, 4], [1, 2]]


@BOTH
def test_messages_match_by_their_order_between_two_workers_not_by_step(hold):
    first = [_give(1, 0, 1), _take(1, 0, 1), _give(1, 1, 2)]
    second = [
        ScheduleStep(adds=(Move(0, 0, 1),)),
        ScheduleStep(sends=(Move(0, 1, 2),)),
        ScheduleStep(takes=(Move(0, 1, 2),)),
    ]
    assert execute([first, second], [[1, 2], [10, 20]], hold=hold) == [[20, 2], [11, 2]]


@BOTH
def test_workers_that_wait_for_each_other_are_a_deadlock(hold):
    circle = [[_take((rank - 1) % 3), _give((rank + 1) % 3)] for rank in range(3)]
    with pytest.raises(Broken, match="deadlock"):
        execute(circle, [[0, 0]] * 3, hold=hold)


def test_blocking_sends_can_deadlock_where_buffered_sends_do_not():
    both_send_first = [[_give(1), _take(1)], [_give(0), _take(0)]]
    assert execute(both_send_first, [[1, 1], [2, 2]], hold=True) == [[2, 2], [1, 1]]
    with pytest.raises(Broken, match="deadlock"):
        execute(both_send_first, [[1, 1], [2, 2]], hold=False)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ([_give(1)], [_take(0, 0, 1)], "sends 2 elements"),
        ([_give(1)], [], "nobody receives"),
        ([], [_take(0)], "deadlock"),
        ([ScheduleStep(sends=(Move(1, 0, 1), Move(1, 1, 2)))], [_take(0, 0, 1)], "two messages"),
        ([ScheduleStep(adds=(Move(1, 0, 1),), takes=(Move(1, 1, 2),))], [_give(0)], "two messages"),
        ([_give(0)], [], "no peer"),
        ([_give(2)], [], "no peer"),
        ([_give(1, 1, 1)], [_take(0, 1, 1)], "empty"),
        ([_give(1, 1, 3)], [_take(0, 1, 3)], "outside"),
        ([ScheduleStep()], [], "does nothing"),
    ],
)
def test_a_broken_rule_is_named(first, second, reason):
    with pytest.raises(Broken, match=reason):
        execute([first, second], [[0, 0], [0, 0]])


def test_overwriting_elements_that_are_added_in_the_same_step_is_refused():
    receiver = [ScheduleStep(adds=(Move(1, 0, 2),), takes=(Move(2, 1, 2),))]
    with pytest.raises(Broken, match="overwrites"):
        execute([receiver, [_give(0)], [_give(0, 1, 2)]], [[0, 0]] * 3)
