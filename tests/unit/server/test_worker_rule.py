"""What a worker does at a step and at each answer. See also tests/property/test_worker_rule.py."""

from __future__ import annotations

import pytest

from echelon.errors import WorkerError
from echelon.server.worker_rule import Action, Phase, SendPush, WorkerRule

ASK, AWAIT, ALONE, INSTALL = (
    Action.ASK,
    Action.AWAIT_ANSWER,
    Action.STEP_ALONE,
    Action.INSTALL_WEIGHTS,
)


def perform(rule, actions):
    """Tell the rule that the actions were performed."""
    for action in actions:
        match action:
            case SendPush():
                rule.push_sent(action.what)
            case Action.ASK:
                rule.ask_sent()
            case Action.ADD_TO_SUM:
                rule.summed()
            case Action.PULL:
                rule.pulled()
    return actions


def step(rule):
    return perform(rule, rule.step())


def test_a_steady_worker_pushes_its_gradient_and_installs_fresh_weights():
    rule = WorkerRule()
    assert rule.sends_early
    assert step(rule) == [SendPush("gradient"), AWAIT]
    assert (rule.phase, rule.arrivals, rule.steps) == (Phase.PUSHED, 1, 1)
    assert rule.released(fresh=True, ask=False) == [INSTALL]
    assert rule.phase is Phase.COMPUTING
    assert not rule.alone


def test_worker_whose_push_was_dropped_steps_locally_and_merges_later():
    rule = WorkerRule()
    step(rule)
    assert rule.released(fresh=False, ask=True) == [ALONE]
    assert rule.alone
    assert rule.trains_on_own_weights
    assert perform(rule, rule.merge()) == [SendPush("delta", exact=True), AWAIT]
    assert rule.released(fresh=True, ask=False) == [INSTALL]
    assert rule.merge() == []


def test_a_worker_that_must_ask_sends_nothing_before_it_is_answered():
    rule = WorkerRule()
    step(rule)
    rule.released(fresh=True, ask=True)
    assert not rule.sends_early
    assert step(rule) == [ASK, AWAIT]
    assert rule.arrivals == 1, "an ask and the push that it leads to have the same number"
    assert perform(rule, rule.invited()) == [SendPush("gradient"), AWAIT]
    assert rule.arrivals == 2
    assert rule.released(fresh=True, ask=False) == [INSTALL]


def test_worker_released_after_an_ask_steps_locally_and_the_ask_counts_as_an_arrival():
    rule = WorkerRule()
    step(rule)
    rule.released(fresh=True, ask=True)
    step(rule)
    assert rule.released(fresh=False, ask=True) == [ALONE]
    assert rule.arrivals == 2


def test_invited_worker_with_local_steps_pushes_its_delta_including_this_step():
    rule = WorkerRule()
    step(rule)
    rule.released(fresh=False, ask=True)
    step(rule)
    assert perform(rule, rule.invited()) == [ALONE, SendPush("delta"), AWAIT]
    assert rule.released(fresh=False, ask=False) == [], "the step was taken before the push"
    assert rule.alone


def test_worker_with_local_steps_pushes_its_delta_even_without_asking():
    rule = WorkerRule()
    step(rule)
    rule.released(fresh=False, ask=False)
    assert not rule.sends_early
    assert step(rule) == [ALONE, SendPush("delta"), AWAIT]


def test_deferred_weights_need_no_action_at_the_release():
    rule = WorkerRule(defers=True)
    assert step(rule) == [SendPush("gradient"), Action.DEFER_WEIGHTS]
    assert rule.released(fresh=True, ask=False) == []
    assert step(rule) == [SendPush("gradient"), Action.DEFER_WEIGHTS]


def test_with_a_period_gradients_are_summed_between_pushes_and_pulls():
    rule = WorkerRule(push_every=2, pull_every=3)
    add = Action.ADD_TO_SUM
    assert step(rule) == [add, ALONE]
    assert rule.has_sum
    assert step(rule) == [add, ALONE, SendPush("sum", wants_weights=False), AWAIT]
    assert not rule.has_sum
    assert rule.released(fresh=False, ask=False) == []
    assert step(rule) == [add, ALONE, Action.PULL]
    assert step(rule) == [add, ALONE, SendPush("sum", wants_weights=False), AWAIT]
    rule.released(fresh=False, ask=False)
    step(rule)
    assert step(rule) == [add, ALONE, SendPush("sum", wants_weights=True), AWAIT]
    assert rule.released(fresh=True, ask=False) == [INSTALL]


def test_remaining_sum_is_merged_without_the_codec():
    rule = WorkerRule(push_every=4, pull_every=4)
    step(rule)
    assert perform(rule, rule.merge()) == [SendPush("sum", exact=True), AWAIT]
    assert rule.released(fresh=True, ask=False) == [INSTALL]
    assert not rule.has_sum
    assert rule.merge() == []


def test_a_policy_of_weights_pushes_them_after_the_own_step():
    rule = WorkerRule(push_every=2, pull_every=2, pushes="weights")
    assert step(rule) == [ALONE]
    assert step(rule) == [ALONE, SendPush("weights"), AWAIT]


def test_refused_gradient_is_not_a_step_and_a_refused_sum_is_dropped():
    steady, local = WorkerRule(), WorkerRule(push_every=2, pull_every=2)
    steady.step()
    steady.push_refused("gradient")
    assert steady.steps == 0
    assert step(steady) == [SendPush("gradient"), AWAIT], "the script may go on"
    step(local)
    local.step()
    local.summed()
    local.push_refused("sum")
    assert not local.has_sum
    assert local.steps == 2


def test_worker_trains_on_server_weights_again_after_a_pull():
    rule = WorkerRule()
    step(rule)
    rule.released(fresh=False, ask=False)
    rule.pulled()
    assert not rule.trains_on_own_weights
    assert rule.merge() == []


def unasked(rule):
    rule.invited()


def unpushed(rule):
    rule.released(fresh=True, ask=False)


def stepped_twice(rule):
    step(rule)
    rule.step()


def invited_after_a_push(rule):
    step(rule)
    rule.invited()


@pytest.mark.parametrize("illegal", [unasked, unpushed, stepped_twice, invited_after_a_push])
def test_unexpected_answer_or_step_raises_an_error(illegal):
    with pytest.raises(WorkerError, match=r"a worker that is .* cannot"):
        illegal(WorkerRule())
