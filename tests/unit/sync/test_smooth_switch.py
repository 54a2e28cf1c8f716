"""The gradient buffer: when it is applied, and who waits."""

from __future__ import annotations

import pytest

from arrivals import decided, play
from echelon.errors import ConfigError, UnknownName
from echelon.sync.families.serve import Apply, Arrival, Release, WeightedPush
from echelon.sync.policies.smooth_switch import SmoothSwitch
from echelon.sync.policy import POLICIES, ClusterInfo
from echelon.sync.thresholds.step import StepThreshold

FOUR = ClusterInfo(workers=4, servers=1, lr=0.01)


def _arrival(worker, step=0, samples=1.0):
    return Arrival(worker=worker, step=step, t=0.0, samples=samples)


def _sizes(text, programmes):
    run = play(POLICIES.build(text), FOUR, programmes)
    return [len(apply.parts) for apply in decided(run, Apply)]


def test_at_first_every_gradient_is_applied_on_arrival():
    rule = SmoothSwitch().rule(FOUR)
    assert rule.arrive(_arrival(3)) == [Apply((WeightedPush(3, 0, 1.0),)), Release(3)]
    assert rule.state() == {"K": 1, "buffered": 0}


def test_without_waiting_workers_continue_at_once_with_the_current_weights():
    rule = SmoothSwitch(start=3).rule(FOUR)
    assert rule.arrive(_arrival(0, 0, samples=2)) == [Release(0)]
    assert rule.arrive(_arrival(0, 1, samples=2)) == [Release(0)]
    assert rule.arrive(_arrival(1, 0, samples=4)) == [
        Apply((WeightedPush(0, 0, 0.25), WeightedPush(0, 1, 0.25), WeightedPush(1, 0, 0.5))),
        Release(1),
    ]


def test_with_waiting_workers_continue_when_their_gradient_has_been_applied():
    rule = SmoothSwitch(start=2, waiting=True, combine="sum").rule(FOUR)
    assert rule.arrive(_arrival(0)) == []
    assert rule.arrive(_arrival(2)) == [
        Apply((WeightedPush(0, 0, 1.0), WeightedPush(2, 0, 1.0))),
        Release(0),
        Release(2),
    ]


def test_k_grows_by_one_with_every_step_of_gradients_up_to_the_workers():
    sizes = _sizes("smooth-switch(step=5)", [[1.0] * 10] * 4)
    assert sizes == [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4, 4, 4, 2]  # the last two when all have left


def test_a_step_of_5_over_the_learning_rate_is_500_gradients_at_a_rate_of_one_hundredth():
    assert SmoothSwitch(step_over_lr=5).chosen_threshold(FOUR) == StepThreshold(size=500)
    assert SmoothSwitch().chosen_threshold(FOUR) == StepThreshold(size=500)
    assert SmoothSwitch(step=300).chosen_threshold(FOUR) == StepThreshold(size=300)


@pytest.mark.parametrize("lr", [None, 0.0])
def test_a_step_over_a_learning_rate_that_is_unknown_or_zero_is_refused(lr):
    with pytest.raises(ConfigError, match="learning rate, which is") as caught:
        SmoothSwitch(step_over_lr=5).check(ClusterInfo(workers=4, servers=1, lr=lr))
    assert "step=500" in caught.value.fix


def test_a_buffer_that_can_no_longer_fill_is_applied():
    assert _sizes("smooth-switch(start=4, waiting=true)", [[1, 1, 1], [1, 1], [1, 1], [1]]) == [4, 3, 1]


def test_the_buffer_is_applied_when_the_last_worker_leaves():
    assert _sizes("smooth-switch(start=3)", [[1, 1, 1, 1, 1], [], [], []]) == [1, 1, 1, 1, 1]
    assert _sizes("smooth-switch(start=3)", [[1], [1], [1], [1]]) == [3, 1]


def test_workers_that_join_again_are_counted_again():
    rule = SmoothSwitch(start=2).rule(ClusterInfo(workers=2, servers=1))
    rule.leave(1, 0.0)
    assert rule.state()["K"] == 1
    rule.join(1, 0.0)
    assert rule.state()["K"] == 2


def test_only_a_threshold_that_measures_gradients_listens():
    assert SmoothSwitch(threshold="noise").listens
    assert not SmoothSwitch(threshold="linear(0.1)").listens
    assert not SmoothSwitch().listens


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("smooth-switch(step=5, step_over_lr=5)", "step and step_over_lr cannot be given together"),
        ("smooth-switch(step=5, threshold=noise)", "step and threshold cannot be given together"),
        ("smooth-switch(step=0)", "above 0"),
        ("smooth-switch(step=nan)", "above 0"),
        ("smooth-switch(step_over_lr=-1)", "above 0"),
        ("smooth-switch(start=0)", "made from 0 gradients"),
        ("smooth-switch(combine=max)", "does not fit"),
        ("smooth-switch(threshold=step(0))", "above 0"),
        ("smooth-switch(threshold=linear(-0.5))", "K would decrease"),
    ],
)
def test_invalid_options_are_refused_at_once_with_a_fix(text, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        POLICIES.build(text)
    assert caught.value.where
    assert caught.value.fix


def test_an_unknown_threshold_names_the_nearest_one():
    with pytest.raises(UnknownName) as caught:
        POLICIES.build("smooth-switch(threshold=sigmoit(3, 4))")
    assert caught.value.nearest == "sigmoid"


def test_a_start_above_the_number_of_workers_is_refused():
    with pytest.raises(ConfigError, match="5 gradients cannot come from 4 workers") as caught:
        SmoothSwitch(start=5).check(FOUR)
    assert "at most 4" in caught.value.fix
    SmoothSwitch(start=4).check(FOUR)
