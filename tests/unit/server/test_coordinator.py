"""The coordinator tells the rule of complete pushes only, and turns its decisions into orders."""

from __future__ import annotations

import pytest

from echelon.observe.events import Arrived, Decided
from echelon.server.coordinator import Coordinator
from echelon.server.protocol import Freed, PushInfo
from echelon.simulate.replay import replay
from echelon.sync.families.serve import Apply, Arrival, Drop, Invite, Release, Rule, Wake, WeightedPush
from echelon.sync.policy import POLICIES, ClusterInfo

WORKERS = (0, 2, 5)  # ranks; the policy counts 0, 1, 2


class Events:
    """A recorder that keeps events in memory."""

    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


class Clock:
    def __init__(self):
        self.t = 1000.0

    def __call__(self):
        return self.t


class ScriptedRule(Rule):
    """A rule that remembers what it was told, and returns the decisions in `next`."""

    def __init__(self):
        self.told = []
        self.next = []

    def _decide(self, what):
        self.told.append(what)
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
    return Stage(ScriptedRule(), holders=2)


class Stage:
    def __init__(self, rule, holders):
        self.rule, self.clock, self.recorder = rule, Clock(), Events()
        self.coordinator = Coordinator(
            rule, workers=WORKERS, holders=holders, now=self.clock, recorder=self.recorder, rank=7
        )

    def push(self, worker, step, *decisions, **facts):
        """All of a push arrives, and the rule returns `decisions`."""
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
def test_rule_sees_a_push_when_all_servers_hold_it_and_the_worker_is_done(stage, order):
    stage.rule.next = [Apply((WeightedPush(1, 4, 1.0),))]
    for number, what in enumerate(order):
        if what == "done":
            orders = stage.coordinator.done(2, 4, done())
        else:
            orders = stage.coordinator.held(2, 4, 1.5, 0.25)
        assert bool(orders) == bool(stage.rule.told) == (number == 2)
    assert stage.rule.told == [
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
    assert orders == [Apply((WeightedPush(2, 4, 1.0),))], "orders name ranks, not the policy's numbers"


def test_pushes_of_several_workers_stay_separate(stage):
    coordinator = stage.coordinator
    coordinator.done(0, 0, done())
    coordinator.held(2, 0, 0.0, 0.0)
    coordinator.held(0, 1, 0.0, 0.0)
    assert stage.rule.told == []
    coordinator.held(0, 0, 0.0, 0.0)
    coordinator.held(0, 0, 0.0, 0.0)
    assert [(arrival.worker, arrival.step) for arrival in stage.rule.told] == [(0, 0)]


def test_a_release_has_the_version_and_how_long_the_worker_was_held(stage):
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


def test_an_ask_is_passed_to_the_rule_at_once(stage):
    stage.rule.next = [Invite(1)]
    assert stage.coordinator.ask(2, 6, done(kind="delta")) == [Invite(2)]
    (arrival,) = stage.rule.told
    assert (arrival.kind, arrival.worker, arrival.step) == ("ask", 1, 6)
    assert 2 in stage.coordinator.awaited(), "it is to push now"


def test_workers_that_take_part_and_have_not_arrived_are_awaited(stage):
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


def test_rule_sees_one_departure_and_one_join_if_a_worker_repeats_them(stage):
    for _ in range(2):
        stage.coordinator.leave(5)
    for _ in range(2):
        stage.coordinator.join(5)
    assert stage.rule.told == [("leave", 2, 1000.0), ("join", 2, 1000.0)]


def test_a_worker_that_has_left_is_not_released(stage):
    stage.push(0, 0)
    stage.coordinator.leave(0)
    assert stage.push(2, 0, Release(0), Release(1)) == [Freed(2, True, False, 0, 0.0)]


def test_the_rule_is_asked_again_at_its_wake_up_time_and_not_before(stage):
    coordinator = stage.coordinator
    assert coordinator.next_wake_s is None
    assert stage.push(0, 0, Wake(1002.0), Wake(1001.0)) == []
    assert coordinator.next_wake_s == 1.0
    assert coordinator.tick() == []
    assert len(stage.rule.told) == 1
    stage.clock.t = 1003.0
    assert coordinator.next_wake_s == 0.0
    stage.rule.next = [Release(0)]
    assert coordinator.tick() == [Freed(0, True, False, 0, 3.0)]
    assert stage.rule.told[1:] == [("tick", 1003.0)], "once for both"
    assert coordinator.next_wake_s is None
    assert coordinator.tick() == []


@pytest.mark.parametrize("sync", ["backup(1)", "async", "bounded-delay(1)", "percentage(0.5)", "flexible"])
def test_a_recorded_run_replays_to_the_same_decisions(sync):
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
    events = stage.recorder.events
    assert sum(isinstance(event, Arrived) for event in events) > 15
    assert sum(isinstance(event, Decided) for event in events) > 15
    assert {event.rank for event in events} == {7}
    mismatch = replay(events, policy, cluster)
    assert mismatch is None, str(mismatch)
