"""The coordinator hears of whole pushes only, and gives a rule's decisions as orders to real workers."""

from __future__ import annotations

import pytest

from echelon.observe.events import Arrived, Decided
from echelon.server.coordinator import Coordinator
from echelon.server.protocol import Freed, PushInfo
from echelon.simulate.replay import replay
from echelon.sync.families.serve import Apply, Arrival, Drop, Invite, Release, Rule, Wake, WeightedPush
from echelon.sync.policy import POLICIES, ClusterInfo

WORKERS = (0, 2, 5)  # ranks; the policy counts 0, 1, 2


class Noted:
    """In place of a recorder."""

    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


class Clock:
    def __init__(self):
        self.t = 1000.0

    def __call__(self):
        return self.t


class Told(Rule):
    """Remembers what it was told and decides what it is asked to."""

    def __init__(self):
        self.heard = []
        self.next = []

    def _decide(self, what):
        self.heard.append(what)
        decided, self.next = self.next, []
        return decided

    def arrive(self, arrival):
        return self._decide(arrival)

    def leave(self, worker, t):
        return self._decide(("leave", worker, t))

    def join(self, worker, t):
        return self._decide(("join", worker, t))

    def tick(self, t):
        return self._decide(("tick", t))


@pytest.fixture
def stage():
    return Stage(Told(), holders=2)


class Stage:
    def __init__(self, rule, holders):
        self.rule, self.clock, self.noted = rule, Clock(), Noted()
        self.coordinator = Coordinator(
            rule, workers=WORKERS, holders=holders, now=self.clock, recorder=self.noted, rank=7
        )

    def push(self, worker, step, *decisions, **facts):
        """All of a push arrives; `decisions` are what the rule then says."""
        given = {"kind": "gradient", "read": 0, "samples": 1.0, "compute_s": 0.5, "transfer_s": 0.25}
        self.rule.next = list(decisions)
        orders = self.coordinator.done(worker, step, PushInfo(**{**given, **facts}))
        for _ in range(2):
            orders += self.coordinator.held(worker, step, 1.5, 0.5)
        return orders


def done(**facts):
    return PushInfo(
        **{"kind": "gradient", "read": 3, "samples": 2.0, "compute_s": 0.5, "transfer_s": 0.1, **facts}
    )


@pytest.mark.parametrize(
    "order", [("done", "held", "held"), ("held", "done", "held"), ("held", "held", "done")]
)
def test_the_rule_hears_of_a_push_when_every_holder_has_it_and_all_was_said_about_it(stage, order):
    stage.rule.next = [Apply((WeightedPush(1, 4, 1.0),))]
    for number, what in enumerate(order):
        if what == "done":
            orders = stage.coordinator.done(2, 4, done())
        else:
            orders = stage.coordinator.held(2, 4, 1.5, 0.25)
        assert bool(orders) == bool(stage.rule.heard) == (number == 2)
    assert stage.rule.heard == [
        Arrival(
            worker=1,
            step=4,
            t=1000.0,
            read=3,
            samples=2.0,
            compute_s=0.5,
            transfer_s=0.1,
            square=3.0,
            dot=0.5,
        )
    ]
    assert orders == [Apply((WeightedPush(2, 4, 1.0),))], "by rank, not by the policy's number"


def test_pushes_of_several_workers_do_not_mix(stage):
    coordinator = stage.coordinator
    coordinator.done(0, 0, done())
    coordinator.held(2, 0, 0.0, 0.0)
    coordinator.held(0, 1, 0.0, 0.0)
    assert stage.rule.heard == []
    coordinator.held(0, 0, 0.0, 0.0)
    coordinator.held(0, 0, 0.0, 0.0)
    assert [(heard.worker, heard.step) for heard in stage.rule.heard] == [(0, 0)]


def test_a_release_says_how_long_the_policy_kept_a_worker_and_the_version(stage):
    stage.push(0, 0)
    stage.clock.t += 2.5
    orders = stage.push(
        5, 0, Apply((WeightedPush(0, 0, 0.5), WeightedPush(2, 0, 0.5))), Release(0), Release(2, ask=True)
    )
    assert orders == [
        Apply((WeightedPush(0, 0, 0.5), WeightedPush(5, 0, 0.5))),
        Freed(0, True, False, 1, 2.5),
        Freed(5, True, True, 1, 0.0),
    ]
    assert stage.coordinator.version == 1


def test_a_worker_that_wants_no_weights_gets_none(stage):
    assert stage.push(0, 0, Release(0), wants_weights=False) == [Freed(0, False, False, 0, 0.0)]
    assert stage.push(0, 1, Release(0, fresh=False)) == [Freed(0, False, False, 0, 0.0)]


def test_a_drop_is_an_order_by_rank(stage):
    assert stage.push(5, 3, Drop(2, 3, "late")) == [Drop(5, 3, "late")]
    assert stage.coordinator.version == 0


def test_a_question_is_heard_at_once_and_answered_by_leave_to_go_on_or_to_push(stage):
    stage.rule.next = [Invite(1)]
    assert stage.coordinator.ask(2, 6, done(kind="delta")) == [Invite(2)]
    (heard,) = stage.rule.heard
    assert (heard.kind, heard.worker, heard.step) == ("ask", 1, 6)
    assert 2 in stage.coordinator.awaited(), "it is to push now"


def test_those_who_take_part_and_are_not_there_are_awaited(stage):
    coordinator = stage.coordinator
    assert coordinator.awaited() == [0, 2, 5]
    stage.push(2, 0)
    assert coordinator.awaited() == [0, 5]
    coordinator.leave(5)
    assert coordinator.awaited() == [0]
    stage.push(0, 0, Release(0), Release(1))
    assert coordinator.awaited() == [0, 2]
    coordinator.join(5)
    assert coordinator.awaited() == [0, 2, 5]


def test_leaving_and_joining_twice_is_told_once(stage):
    for _ in range(2):
        stage.coordinator.leave(5)
    for _ in range(2):
        stage.coordinator.join(5)
    assert stage.rule.heard == [("leave", 2, 1000.0), ("join", 2, 1000.0)]


def test_a_worker_that_has_left_is_not_released(stage):
    stage.push(0, 0)
    stage.coordinator.leave(0)
    assert stage.push(2, 0, Release(0), Release(1)) == [Freed(2, True, False, 0, 0.0)]


def test_the_rule_is_asked_again_when_it_wanted_to_be_and_not_before(stage):
    coordinator = stage.coordinator
    assert coordinator.next_wake_s is None
    assert stage.push(0, 0, Wake(1002.0), Wake(1001.0)) == []
    assert coordinator.next_wake_s == 1.0
    assert coordinator.tick() == []
    assert len(stage.rule.heard) == 1
    stage.clock.t = 1003.0
    assert coordinator.next_wake_s == 0.0
    stage.rule.next = [Release(0)]
    assert coordinator.tick() == [Freed(0, True, False, 0, 3.0)]
    assert stage.rule.heard[1:] == [("tick", 1003.0)], "once for both"
    assert coordinator.next_wake_s is None
    assert coordinator.tick() == []


@pytest.mark.parametrize("sync", ["backup(1)", "async", "bounded-delay(1)", "percentage(0.5)", "flexible"])
def test_what_is_recorded_replays(sync):
    policy, cluster = POLICIES.build(sync).resolved(), ClusterInfo(workers=3, servers=1)
    stage = Stage(policy.rule(cluster), holders=1)
    asks, here = set(), set()
    for turn in range(60):
        worker = WORKERS[(turn * 7) % 3 if turn % 5 else 0]
        stage.clock.t += 0.1 + 0.01 * (turn % 3)
        orders = stage.coordinator.tick()
        if worker not in here:
            here.add(worker)
            step = turn
            facts = done(read=stage.coordinator.version, compute_s=0.1 * (1 + turn % 4))
            if worker in asks:
                orders += stage.coordinator.ask(worker, step, facts)
            else:
                orders += stage.coordinator.done(worker, step, facts)
                orders += stage.coordinator.held(worker, step, 0.0, 0.0)
        for order in orders:
            if isinstance(order, Freed):
                here.discard(order.worker)
                (asks.add if order.ask else asks.discard)(order.worker)
            elif isinstance(order, Invite):
                here.discard(order.worker)
                asks.discard(order.worker)
    events = stage.noted.events
    assert sum(isinstance(event, Arrived) for event in events) > 15
    assert sum(isinstance(event, Decided) for event in events) > 15
    assert {event.rank for event in events} == {7}
    mismatch = replay(events, policy, cluster)
    assert mismatch is None, str(mismatch)
