"""The workers that tests of served policies rely on: they find what is wrong with a rule."""

from __future__ import annotations

import pytest

from arrivals import Away, Broken, decided, play
from echelon.sync.families.serve import Apply, Drop, Invite, Release, Rule, Wake, WeightedPush
from echelon.sync.policies.asynchronous import Async
from echelon.sync.policy import ClusterInfo

TWO = ClusterInfo(workers=2, servers=1)


def _policy(arrive, tick=lambda self, t: []):
    rule = type("_Rule", (Rule,), {"arrive": lambda self, a: arrive(a), "tick": tick})

    class Tried(Async):
        def rule(self, cluster):
            return rule()

    return Tried()


def _apply(a):
    return Apply((WeightedPush(a.worker, a.step, 1.0),))


def test_arrivals_come_in_the_order_of_virtual_time_and_all_leave_in_the_end():
    story = play(Async(), TWO, [[3.0], [1.0, 1.0]])
    heard = [(told.what, told.worker, told.t) for told in story]
    assert heard == [
        ("arrive", 1, 1.0),
        ("arrive", 1, 2.0),
        ("leave", 1, 2.0),
        ("arrive", 0, 3.0),
        ("leave", 0, 3.0),
    ]


def test_gradient_has_the_version_it_was_computed_on():
    story = play(Async(), TWO, [[3.0, 3.0], [1.0, 1.0]])
    read = [(told.worker, told.arrival.read) for told in story if told.arrival]
    assert read == [(1, 0), (1, 1), (0, 0), (0, 3)]


def test_worker_that_was_away_joins_again_and_continues():
    story = play(Async(), TWO, [[1.0, Away(5.0), 1.0], []])
    heard = [(told.what, told.t) for told in story if told.worker == 0]
    assert heard == [("arrive", 1.0), ("leave", 1.0), ("join", 6.0), ("arrive", 7.0), ("leave", 7.0)]


def test_worker_with_local_steps_asks_and_pushes_its_delta_when_invited():
    def arrive(a):
        if a.kind == "ask":
            return [Invite(a.worker)] if a.step == 2 else [Release(a.worker, fresh=False, ask=True)]
        return [_apply(a), Release(a.worker, fresh=a.step > 0, ask=a.step == 0)]

    story = play(_policy(arrive), ClusterInfo(workers=1), [[1.0] * 4])
    kinds = [(told.arrival.kind, told.arrival.step) for told in story if told.arrival]
    assert kinds == [("gradient", 0), ("ask", 1), ("ask", 2), ("delta", 2), ("gradient", 3)]


def test_rule_is_woken_once_for_all_wake_ups_that_are_due():
    def arrive(a):
        return [_apply(a), Wake(5.0), Wake(5.0)]

    story = play(_policy(arrive, lambda self, t: [Release(0)]), ClusterInfo(workers=1), [[1.0]])
    assert [(told.what, told.t) for told in story] == [("arrive", 1.0), ("tick", 5.0), ("leave", 5.0)]


@pytest.mark.parametrize(
    ("arrive", "reason"),
    [
        (lambda a: [_apply(a)], "wait for ever"),
        (lambda a: [Release(a.worker)], "nothing became of"),
        (lambda a: [_apply(a), _apply(a), Release(a.worker)], "settled already"),
        (lambda a: [_apply(a), Drop(a.worker, a.step, "late"), Release(a.worker)], "settled already"),
        (lambda a: [Drop(a.worker, a.step, ""), Release(a.worker)], "without a reason"),
        (lambda a: [_apply(a), Release(a.worker), Release(a.worker)], "has not arrived"),
        (lambda a: [_apply(a), Release(1 - a.worker)], "has not arrived"),
        (lambda a: [_apply(a), Invite(a.worker)], "has not asked"),
        (lambda a: [_apply(a), Release(a.worker), Apply(())], "made of nothing"),
        (lambda a: [_apply(a), Wake(float("inf"))], "woken at inf"),
    ],
)
def test_rule_that_breaks_its_contract_is_detected(arrive, reason):
    with pytest.raises(Broken, match=reason):
        play(_policy(arrive), TWO, [[1.0, 1.0], [2.0]])


def test_rule_that_asks_for_endless_wake_ups_is_detected():
    policy = _policy(lambda a: [_apply(a), Wake(a.t)], lambda self, t: [Wake(t + 1)])
    with pytest.raises(Broken, match="have not led to an end"):
        play(policy, TWO, [[1.0], [1.0]], most=100)


def test_rule_that_waits_for_an_absent_worker_is_detected():
    class Both(Rule):
        def __init__(self):
            self.here = []

        def arrive(self, arrival):
            self.here.append(arrival)
            if len(self.here) < 2:
                return []
            return [*(_apply(a) for a in self.here), Release(0), Release(1)]

    class Tried(Async):
        def rule(self, cluster):
            return Both()

    with pytest.raises(Broken, match=r"workers \[0\] wait for ever"):
        play(Tried(), TWO, [[1.0], [Away(5.0), 1.0]])


def test_decisions_are_found_by_kind():
    story = play(Async(), TWO, [[1.0], [2.0]])
    assert decided(story, Apply) == [Apply((WeightedPush(0, 0, 1.0),)), Apply((WeightedPush(1, 0, 1.0),))]
