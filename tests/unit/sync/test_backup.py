"""Backup workers: rounds that do not wait for the slowest."""

from __future__ import annotations

import pytest

from arrivals import Away, decided, play
from echelon.errors import ConfigError
from echelon.sync.families.serve import Apply, Arrival, Drop, Release, WeightedPush
from echelon.sync.policies.backup import Backup
from echelon.sync.policy import POLICIES, ClusterInfo

FOUR = ClusterInfo(workers=4, servers=1)


def _arrival(worker, step=0, read=0, samples=1.0):
    return Arrival(worker=worker, step=step, t=0.0, read=read, samples=samples)


def test_a_round_ends_with_the_weighted_mean_when_all_but_the_spares_have_arrived():
    rule = Backup(spares=1).rule(ClusterInfo(workers=3, servers=1))
    assert rule.arrive(_arrival(2, samples=30)) == []
    assert rule.arrive(_arrival(0, samples=10)) == [
        Apply((WeightedPush(2, 0, 0.75), WeightedPush(0, 0, 0.25))),
        Release(2),
        Release(0),
    ]


def test_a_late_gradient_is_dropped_and_its_worker_joins_the_next_round():
    rule = Backup(spares=1).rule(ClusterInfo(workers=2, servers=1))
    rule.arrive(_arrival(0))
    dropped, released = rule.arrive(_arrival(1))
    assert (dropped.worker, dropped.step) == (1, 0)
    assert "round is over" in dropped.reason
    assert released == Release(1)
    assert rule.arrive(_arrival(1, step=1, read=1)) == [Apply((WeightedPush(1, 1, 1.0),)), Release(1)]
    assert rule.state()["dropped"] == 1


def test_the_spares_are_the_late_workers_of_each_round():
    run = play(Backup(spares=1), FOUR, [[1, 9], [2, 1], [3, 1], [9, 1]])
    rounds = [{part.worker for part in apply.parts} for apply in decided(run, Apply)]
    assert rounds[:2] == [{0, 1, 2}, {1, 2, 3}]


def test_without_spares_every_round_has_all_workers_and_nothing_is_dropped():
    run = play(Backup(spares=0), FOUR, [[1] * 5, [2] * 5, [3] * 5, [9] * 5])
    assert not decided(run, Drop)
    assert [len(apply.parts) for apply in decided(run, Apply)] == [4] * 5


def test_workers_that_leave_are_not_waited_for():
    run = play(Backup(spares=0), FOUR, [[1] * 5, [1] * 5, [1] * 3, [1]])
    assert [len(apply.parts) for apply in decided(run, Apply)] == [4, 3, 3, 2, 2]


def test_a_worker_that_joins_again_is_waited_for_again_once_its_old_gradient_is_dropped():
    run = play(Backup(spares=0), ClusterInfo(workers=2, servers=1), [[1] * 5, [1, Away(1.5), 1, 1]])
    assert [len(apply.parts) for apply in decided(run, Apply)] == [2, 1, 2, 1, 1]
    assert len(decided(run, Drop)) == 1


def test_with_fewer_workers_than_spares_a_round_is_one_gradient():
    run = play(Backup(spares=3), FOUR, [[1, 1], [], [], []])
    assert [len(apply.parts) for apply in decided(run, Apply)] == [1, 1]


def test_a_server_that_resumed_at_a_later_version_drops_nothing_at_first():
    rule = Backup(spares=0).rule(ClusterInfo(workers=2, servers=1))
    rule.arrive(_arrival(0, read=70))
    assert isinstance(rule.arrive(_arrival(1, read=70))[0], Apply)
    assert isinstance(rule.arrive(_arrival(1, step=1, read=70))[0], Drop)


def test_a_negative_number_of_spares_is_refused_at_once():
    with pytest.raises(ConfigError, match="-1 spares") as caught:
        POLICIES.build("backup(-1)")
    assert caught.value.fix


@pytest.mark.parametrize("spares", [4, 5])
def test_spares_must_be_fewer_than_workers(spares):
    with pytest.raises(ConfigError, match=f"{spares} of 4 workers are spares") as caught:
        Backup(spares=spares).check(FOUR)
    assert "at most 3" in caught.value.fix
    Backup(spares=3).check(FOUR)
