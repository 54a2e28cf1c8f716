"""Percentage: which workers take part in which round, and how the others' deltas are applied."""

from __future__ import annotations

import pytest

from arrivals import Told, play
from echelon.errors import ConfigError
from echelon.sync.families.serve import Apply, Arrival, Invite, Kind, Release, WeightedPush
from echelon.sync.policy import POLICIES, ClusterInfo


def _cluster(workers: int, **known) -> ClusterInfo:
    return ClusterInfo(workers=workers, servers=1, **known)


def _rule(text: str, workers: int, **known):
    policy, cluster = POLICIES.build(text), _cluster(workers, **known)
    policy.check(cluster)
    return policy.rule(cluster)


def _arrival(worker: int, step: int, kind: Kind = "gradient", samples: float = 1.0) -> Arrival:
    return Arrival(worker=worker, step=step, t=0.0, kind=kind, samples=samples)


def _members(text: str, steps: int, workers: int, **known) -> list[list[int]]:
    """The members of each update, if all workers are equally fast."""
    run: list[Told] = play(POLICIES.build(text), _cluster(workers, **known), [[1.0] * steps] * workers)
    applied = [decision for told in run for decision in told.decisions if isinstance(decision, Apply)]
    return [[part.worker for part in update.parts] for update in applied]


def test_the_first_round_has_all_workers_weighted_by_samples():
    rule = _rule("percentage(0.5)", 2)
    assert rule.arrive(_arrival(0, 0, samples=3.0)) == []
    assert rule.arrive(_arrival(1, 0)) == [
        Apply((WeightedPush(0, 0, 0.75), WeightedPush(1, 0, 0.25))),
        Release(0, ask=True),
        Release(1, ask=True),
    ]


def test_a_share_of_a_fifth_is_every_fifth_round():
    members = _members("percentage(shares=[1.0, 0.2])", 16, 2)
    with_both = [number for number, workers in enumerate(members) if workers == [0, 1]]
    assert with_both == [0, 5, 10, 15]


def test_worker_that_is_not_a_member_continues_locally_at_once():
    rule = _rule("percentage(shares=[1.0, 0.5])", 2)
    rule.arrive(_arrival(0, 0))
    rule.arrive(_arrival(1, 0))
    for step in range(1, 4):
        assert rule.arrive(_arrival(1, step, "ask")) == [Release(1, fresh=False, ask=True)]
    assert rule.arrive(_arrival(0, 1)) == [Apply((WeightedPush(0, 1, 1.0),)), Release(0)]


def test_a_member_is_awaited_and_its_delta_is_part_of_the_mean():
    rule = _rule("percentage(shares=[1.0, 0.5])", 2)
    for arrival in (_arrival(0, 0), _arrival(1, 0), _arrival(0, 1)):
        rule.arrive(arrival)
    assert rule.arrive(_arrival(0, 2, samples=3.0)) == []
    assert rule.arrive(_arrival(1, 1, "ask")) == [Invite(1)]
    assert rule.arrive(_arrival(1, 1, "delta")) == [
        Apply((WeightedPush(0, 2, 0.75), WeightedPush(1, 1, 0.25))),
        Release(0),
        Release(1, ask=True),
    ]


def test_round_without_members_ends_when_all_have_continued_locally():
    rule = _rule("percentage(0.5)", 2)
    rule.arrive(_arrival(0, 0))
    rule.arrive(_arrival(1, 0))
    assert rule.state() == {"round": 0, "taking_part": 0}
    alone = [Release(0, fresh=False, ask=True)]
    assert rule.arrive(_arrival(0, 1, "ask")) == alone
    assert rule.arrive(_arrival(0, 2, "ask")) == alone
    assert rule.arrive(_arrival(1, 1, "ask")) == [Release(1, fresh=False, ask=True)]
    assert rule.state() == {"round": 1, "taking_part": 2}
    assert rule.arrive(_arrival(0, 3, "ask")) == [Invite(0)]


def test_a_round_without_members_ends_when_the_last_other_worker_leaves():
    rule = _rule("percentage(0.5)", 2)
    rule.arrive(_arrival(0, 0))
    rule.arrive(_arrival(1, 0))
    rule.arrive(_arrival(0, 1, "ask"))
    assert rule.leave(1, 1.0) == []
    assert rule.arrive(_arrival(0, 2, "ask")) == [Invite(0)]


def test_members_do_not_wait_for_a_worker_that_left():
    rule = _rule("percentage(1.0)", 3)
    rule.arrive(_arrival(0, 0))
    rule.arrive(_arrival(1, 0))
    assert rule.leave(2, 1.0) == [
        Apply((WeightedPush(0, 0, 0.5), WeightedPush(1, 0, 0.5))),
        Release(0),
        Release(1),
    ]


def test_members_wait_for_a_joining_worker_in_its_rounds():
    rule = _rule("percentage(1.0)", 2)
    rule.leave(1, 0.0)
    rule.join(1, 1.0)
    assert rule.arrive(_arrival(0, 0)) == []


def test_a_push_of_a_worker_that_is_not_a_member_counts():
    rule = _rule("percentage(shares=[1.0, 0.5])", 2)
    rule.arrive(_arrival(0, 0))
    rule.arrive(_arrival(1, 0))
    assert rule.arrive(_arrival(1, 1, "delta")) == []
    assert rule.arrive(_arrival(0, 1))[0] == Apply((WeightedPush(0, 1, 0.5), WeightedPush(1, 1, 0.5)))


def test_a_groups_share_is_that_of_its_members():
    members = _members("percentage(shares=[1.0, 0.5])", 5, 4, groups=((0, 3), (1, 2)))
    assert members == [[0, 1, 2, 3], [0, 3], [0, 1, 2, 3], [0, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(("by", "known"), [("speed", "speeds"), ("link", "links")])
def test_slow_workers_take_part_less_often(by, known):
    members = _members(f"percentage(by={by})", 5, 2, **{known: (400.0, 100.0)})
    assert members == [[0, 1], [0], [0], [0], [0, 1]]


@pytest.mark.parametrize(
    "text",
    [
        "percentage(0)",
        "percentage(-0.5)",
        "percentage(1.5)",
        "percentage(nan)",
        "percentage(shares=[1.0, 0])",
        "percentage(shares=[1.0, 2.0])",
        "percentage(shares=[1.0, 0.5], by=speed)",
        "percentage(by=luck)",
    ],
)
def test_shares_outside_of_zero_to_one_and_two_sources_of_shares_are_refused(text):
    with pytest.raises(ConfigError) as refused:
        POLICIES.build(text)
    assert refused.value.fix


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("percentage", ClusterInfo(workers=2)),
        ("percentage(shares=[1.0, 0.5, 0.5])", ClusterInfo(workers=2, servers=1)),
        ("percentage(shares=[])", ClusterInfo(workers=2, servers=1)),
        ("percentage(shares=[1.0, 0.5, 0.5])", ClusterInfo(workers=4, servers=1, groups=((0, 1), (2, 3)))),
        ("percentage(by=speed)", ClusterInfo(workers=2, servers=1, links=(1.0, 1.0))),
        ("percentage(by=link)", ClusterInfo(workers=2, servers=1, speeds=(1.0, 1.0))),
        ("percentage(by=speed)", ClusterInfo(workers=2, servers=1, speeds=(1.0, 0.0))),
    ],
)
def test_shares_that_do_not_fit_the_cluster_are_refused_by_check(text, cluster):
    policy = POLICIES.build(text)
    with pytest.raises(ConfigError) as refused:
        policy.check(cluster)
    assert refused.value.fix
