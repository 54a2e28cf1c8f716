import pytest

from echelon.simulate.clock import Clock


def test_actions_run_by_time_and_not_in_the_order_of_scheduling():
    clock, done = Clock(), []
    for t in (3.0, 1.0, 2.0):
        clock.at(t, lambda t=t: done.append((t, clock.now)))
    clock.run(2.5)
    assert done == [(1.0, 1.0), (2.0, 2.0)]


def test_actions_of_the_same_time_run_in_the_order_of_scheduling():
    clock, done = Clock(), []
    for name in "abc":
        clock.at(1.0, lambda name=name: done.append(name))
    clock.run(2.0)
    assert done == ["a", "b", "c"]


def test_an_action_may_schedule_another_at_the_same_time():
    clock, done = Clock(), []
    clock.at(1.0, lambda: clock.after(0.0, lambda: done.append(clock.now)))
    clock.run(2.0)
    assert done == [1.0]


def test_actions_due_at_the_end_do_not_run():
    clock, done = Clock(), []
    clock.at(2.0, lambda: done.append("late"))
    assert clock.run(2.0)
    assert done == []
    assert clock.now == 2.0


def test_a_run_with_only_background_actions_left_reports_it():
    clock = Clock()
    clock.at(1.0, lambda: None)
    clock.at(1.5, lambda: None, background=True)
    assert not clock.run(9.0)
    assert clock.now == 1.0


@pytest.mark.parametrize("t", [0.5, float("nan")])
def test_actions_cannot_be_scheduled_in_the_past(t):
    clock = Clock()
    clock.at(1.0, lambda: None)
    clock.at(3.0, lambda: None)
    clock.run(2.0)
    with pytest.raises(ValueError, match="cannot schedule"):
        clock.at(t, lambda: None)
