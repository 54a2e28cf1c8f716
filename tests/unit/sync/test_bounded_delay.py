"""Bounded delay: which workers wait, and the weights of applied gradients."""

from __future__ import annotations

import pytest

from arrivals import Away, decided, play
from echelon.errors import ConfigError
from echelon.sync.families.serve import Apply, Arrival, Release, WeightedPush
from echelon.sync.policies.bounded_delay import BoundedDelay
from echelon.sync.policy import POLICIES, ClusterInfo

TWO = ClusterInfo(workers=2, servers=1)


def _arrival(worker, step, samples=1.0):
    return Arrival(worker=worker, step=step, t=0.0, samples=samples)


def test_a_worker_beyond_the_bound_waits_until_the_slowest_catches_up():
    rule = BoundedDelay(bound=1).rule(TWO)
    assert rule.arrive(_arrival(0, 0)) == [Apply((WeightedPush(0, 0, 0.5),)), Release(0)]
    assert rule.arrive(_arrival(0, 1)) == []
    assert rule.state() == {"held": 1, "ahead": 2}
    assert rule.arrive(_arrival(1, 0)) == [
        Apply((WeightedPush(0, 1, 0.5), WeightedPush(1, 0, 0.5))),
        Release(0),
        Release(1),
    ]


def test_with_bound_0_a_round_has_exactly_the_weights_of_the_whole_batch():
    rule = BoundedDelay(bound=0).rule(ClusterInfo(workers=3, servers=1))
    assert rule.arrive(_arrival(2, 0, samples=20)) == []
    assert rule.arrive(_arrival(0, 0, samples=3)) == []
    assert rule.arrive(_arrival(1, 0, samples=10)) == [
        Apply((WeightedPush(2, 0, 20 / 33), WeightedPush(0, 0, 3 / 33), WeightedPush(1, 0, 10 / 33))),
        Release(2),
        Release(0),
        Release(1),
    ]


def test_workers_without_a_push_yet_count_as_the_mean_of_the_others():
    rule = BoundedDelay(bound=5).rule(ClusterInfo(workers=4, servers=1))
    assert rule.arrive(_arrival(0, 0, samples=10))[0] == Apply((WeightedPush(0, 0, 0.25),))
    assert rule.arrive(_arrival(1, 0, samples=30))[0] == Apply((WeightedPush(1, 0, 30 / 80),))


def test_with_scale_sum_gradients_are_applied_in_full():
    rule = BoundedDelay(bound=0, scale="sum").rule(TWO)
    rule.arrive(_arrival(0, 0, samples=10))
    assert rule.arrive(_arrival(1, 0, samples=30))[0] == Apply(
        (WeightedPush(0, 0, 1.0), WeightedPush(1, 0, 1.0))
    )


def test_a_waiting_worker_continues_when_the_slowest_leaves():
    rule = BoundedDelay(bound=0).rule(TWO)
    assert rule.arrive(_arrival(0, 0)) == []
    assert rule.leave(1, 0.0) == [Apply((WeightedPush(0, 0, 1.0),)), Release(0)]


def test_a_gradient_that_others_have_read_is_not_applied_again():
    rule = BoundedDelay(bound=1).rule(ClusterInfo(workers=3, servers=1))
    for step in range(2):
        rule.arrive(_arrival(0, step))  # held after its second
    assert rule.arrive(_arrival(1, 0))[0].parts == (WeightedPush(0, 1, 1 / 3), WeightedPush(1, 0, 1 / 3))
    assert rule.leave(2, 0.0) == [Release(0)]


def test_a_worker_that_joins_starts_at_the_slowest_workers_step():
    run = play(BoundedDelay(bound=0), TWO, [[1] * 8, [1, Away(3.5), 1, 1]])
    assert [len(apply.parts) for apply in decided(run, Apply)] == [2, 1, 1, 1, 2, 2, 1, 1]


def test_a_worker_that_joins_an_empty_table_starts_a_new_count():
    run = play(BoundedDelay(bound=0), TWO, [[1, 1, Away(9), 1], [1, 1, Away(9), 1]])
    assert [len(apply.parts) for apply in decided(run, Apply)] == [2, 2, 2]


def test_a_negative_bound_is_refused_at_once():
    with pytest.raises(ConfigError, match="at most -1 steps ahead") as caught:
        POLICIES.build("bounded-delay(-1)")
    assert caught.value.fix
