"""Flexible: which workers are left out, when, and how they come back."""

from __future__ import annotations

import pytest

from arrivals import Away, Told, decided, play
from echelon.errors import ConfigError
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Drop,
    Invite,
    Kind,
    Release,
    Rule,
    Wake,
    WeightedPush,
)
from echelon.sync.policy import POLICIES, ClusterInfo

CLUSTER = ClusterInfo(workers=4, servers=1)


class Cluster:
    """Three or more workers that need 1 s for a step and 0.1 s for its transfer by default."""

    def __init__(self, text: str = "flexible", workers: int = 4) -> None:
        self.rule: Rule = POLICIES.build(text).rule(ClusterInfo(workers=workers, servers=1))
        self.workers = range(workers)
        self.steps = [0] * workers
        self.t = 0.0

    def round(self, *workers: int, **slow: float) -> list[Decision]:
        """All of these arrive 1.1 s from now; returns the decisions on the last arrival."""
        self.t += 1.1
        return [self.push(worker, **slow) for worker in workers or self.workers][-1]

    def push(
        self, worker: int, *, kind: Kind = "gradient", compute_s: float = 1.0, transfer_s: float = 0.1
    ) -> list[Decision]:
        arrival = Arrival(
            worker=worker,
            step=self.steps[worker],
            t=self.t,
            kind=kind,
            compute_s=compute_s,
            transfer_s=transfer_s,
        )
        decisions = self.rule.arrive(arrival)
        self.steps[worker] += Invite(worker) not in decisions
        return decisions

    def leave_out_the_last(self, **slow: float) -> None:
        """The rule after four rounds of all workers; in the last of them the last worker was slow."""
        for _ in range(3):
            self.round()
        self.t += 1.1
        for worker in self.workers[:-1]:
            self.push(worker)
        assert Release(self.workers[-1], ask=True) in self.push(self.workers[-1], **slow)
        assert self.left_out == 1

    @property
    def left_out(self) -> int:
        return int(self.rule.state()["left_out"])


def _parts(decisions: list[Decision]) -> list[int]:
    return [part.worker for decision in decisions if isinstance(decision, Apply) for part in decision.parts]


def _members(run: list[Told]) -> list[list[int]]:
    return [[part.worker for part in update.parts] for update in decided(run, Apply)]


def test_normal_workers_are_in_every_round_and_push_without_asking():
    cluster = Cluster()
    for step in range(20):
        assert cluster.round() == [
            Apply(tuple(WeightedPush(worker, step, 0.25) for worker in range(4))),
            *(Release(worker) for worker in range(4)),
        ]


def test_a_worker_that_is_slow_from_the_start_is_left_out_within_a_few_rounds():
    run = play(POLICIES.build("flexible"), CLUSTER, [[1.0] * 60] * 3 + [[5.0] * 13])
    members = _members(run)
    assert members[:3] == [[0, 1, 2, 3]] * 3
    assert members[5:] == [[0, 1, 2]] * (len(members) - 5)


def _left_out(run: list[Told]) -> list[int]:
    """The rounds without worker 3, as long as it is active."""
    members = _members(run)
    last = max(number for number, workers in enumerate(members) if 3 in workers)
    return [number for number in range(last) if 3 not in members[number]]


def test_a_worker_that_is_normal_again_is_taken_back_and_stays():
    run = play(
        POLICIES.build("flexible"), CLUSTER, [[1.0] * 100] * 3 + [[1.0] * 5 + [5.0] * 5 + [1.0] * 60]
    )
    out = _left_out(run)
    assert out == list(range(5, out[-1] + 1))  # five slow steps take 25 s, and rounds of the others 1 s
    assert 20 <= len(out) <= 27
    assert decided(run, Invite) == [Invite(3)]


@pytest.mark.parametrize("detector", ["running-average", "sliding-window(5, threshold=1)"])
def test_a_worker_slower_than_its_own_past_is_left_out_for_a_while(detector):
    policy = POLICIES.build(f'flexible(detector="{detector}")')
    run = play(policy, CLUSTER, [[1.0] * 60] * 3 + [[1.0] * 10 + [9.0] + [1.0] * 30])
    out = _left_out(run)
    assert out == list(range(10, out[-1] + 1))
    assert 7 <= len(out) <= 10  # the slow step takes 9 s


def test_workers_of_different_speeds_are_normal_by_their_own_average():
    policy = POLICIES.build("flexible(detector=running-average)")
    run = play(policy, CLUSTER, [[1.0] * 20] * 3 + [[5.0] * 20])
    assert _members(run) == [[0, 1, 2, 3]] * 20


def test_a_member_that_is_late_is_left_out_of_the_round_at_once():
    cluster = Cluster()
    for _ in range(3):
        cluster.round()
    released = cluster.t
    wakes = [decision for decision in cluster.round(0) if isinstance(decision, Wake)]
    assert cluster.push(1) == cluster.push(2) == []
    # 1 s and 0.1 s are usual, half as much again is normal
    assert wakes == [Wake(pytest.approx(released + 1.65))]
    assert cluster.rule.tick(released + 1.6) == [Wake(wakes[0].t)]
    decisions = cluster.rule.tick(wakes[0].t)
    assert _parts(decisions) == [0, 1, 2]
    assert decisions[1:] == [Release(0), Release(1), Release(2)]
    assert cluster.left_out == 1


def test_a_late_member_whose_round_is_still_open_counts_in_it():
    policy = POLICIES.build("flexible(detector=running-average)")
    run = play(policy, CLUSTER, [[1.0] * 8, [1.0] * 8, [5.0] * 8, [1.0] * 5 + [3.0] + [1.0] * 2])
    out = [told.state["left_out"] for told in run if told.what == "tick"]
    assert max(out) == 1
    assert _members(run)[5] == [0, 1, 2, 3]
    assert decided(run, Drop) == []


def test_a_gradient_that_arrives_after_its_round_is_not_applied():
    cluster = Cluster()
    for _ in range(3):
        cluster.round()
    cluster.round(0, 1, 2)
    cluster.rule.tick(cluster.t + 5)
    cluster.t += 5
    assert cluster.push(3, compute_s=5.0) == [
        Drop(3, 3, "left out of round 3"),
        Release(3, fresh=False, ask=True),
    ]
    assert cluster.push(3, kind="ask", compute_s=5.0) == [Release(3, fresh=False, ask=True)]
    assert cluster.push(3, kind="ask") == [Invite(3)]


def test_a_slow_member_counts_in_its_round_and_is_left_out_of_the_next():
    cluster = Cluster()
    for _ in range(3):
        cluster.round()
    cluster.t += 0.5
    for worker in range(3):
        cluster.push(worker)
    decisions = cluster.push(3, compute_s=2.0)
    assert _parts(decisions) == [0, 1, 2, 3]
    assert decisions[-1] == Release(3, ask=True)
    assert _parts(cluster.round(0, 1, 2)) == [0, 1, 2]


def test_a_worker_that_comes_back_sends_its_delta():
    cluster = Cluster()
    cluster.leave_out_the_last(compute_s=5.0)
    assert cluster.push(3, kind="ask", compute_s=5.0) == [Release(3, fresh=False, ask=True)]
    assert cluster.push(3, kind="ask") == [Invite(3)]
    assert cluster.left_out == 0
    assert cluster.round(0, 1, 2) == []
    decisions = cluster.push(3, kind="delta")
    assert decisions[0] == Apply(
        (
            WeightedPush(0, 4, 0.25),
            WeightedPush(1, 4, 0.25),
            WeightedPush(2, 4, 0.25),
            WeightedPush(3, 5, 0.25),
        )
    )
    assert decisions[-1] == Release(3)


@pytest.mark.parametrize(("transfer_s", "slow"), [(0.1, False), (5.0, True)])
def test_late_delta_goes_into_the_open_round(transfer_s, slow):
    cluster = Cluster()
    cluster.leave_out_the_last(compute_s=5.0)
    cluster.push(3, kind="ask", compute_s=5.0)
    assert cluster.push(3, kind="ask") == [Invite(3)]
    cluster.round(0, 1, 2)
    assert _parts(cluster.rule.tick(cluster.t + 1.0)) == [0, 1, 2]
    assert not _parts(cluster.push(3, kind="delta", transfer_s=transfer_s))
    decisions = cluster.round(0, 1, 2)
    assert _parts(decisions) == [0, 1, 2, 3]
    assert decisions[-1] == Release(3, ask=slow)


def test_worker_that_is_normal_at_its_first_ask_pushes_its_gradient():
    cluster = Cluster()
    cluster.leave_out_the_last(compute_s=5.0)
    cluster.round(0, 1, 2)
    assert cluster.push(3, kind="ask") == [Invite(3)]
    cluster.push(3)
    assert _parts(cluster.round(0, 1, 2)) == [0, 1, 2, 3]


def test_an_invited_worker_is_awaited_until_it_is_late():
    cluster = Cluster()
    cluster.leave_out_the_last(compute_s=5.0)
    (wake,) = cluster.round(0)
    assert cluster.push(3, kind="ask") == [Invite(3)]  # to be called earlier, for the others, is enough
    assert cluster.push(1) == cluster.push(2) == []
    assert cluster.rule.tick(wake.t) == [Wake(pytest.approx(cluster.t + 1.65))]
    assert _parts(cluster.rule.tick(cluster.t + 1.7)) == [0, 1, 2]


def test_a_step_that_was_asked_about_and_pushed_counts_once():
    cluster = Cluster("flexible(detector=running-average)")
    cluster.leave_out_the_last(compute_s=5.0)
    cluster.round(0, 1, 2)  # the average is 2 s, the limit 3 s
    assert cluster.push(3, kind="ask", compute_s=2.9) == [Invite(3)]
    cluster.push(3, compute_s=2.9)
    cluster.round(0, 1, 2)  # the average is 2.18 s, the limit 3.27 s, and 3.45 s if it counted twice
    cluster.push(3, compute_s=3.4)
    assert Release(3, ask=True) in cluster.round(0, 1, 2)


def test_a_worker_with_slow_transfers_is_tried_again_after_some_rounds():
    cluster = Cluster("flexible(retry=3)")
    cluster.leave_out_the_last(transfer_s=2.0)
    for _ in range(2):
        assert cluster.push(3, kind="ask") == [Release(3, fresh=False, ask=True)]
        cluster.round(0, 1, 2)
    assert cluster.push(3, kind="ask", compute_s=5.0) == [Release(3, fresh=False, ask=True)]
    assert cluster.push(3, kind="ask") == [Invite(3)]


def test_a_slow_transfer_with_a_fast_computation_is_normal():
    cluster = Cluster()
    for _ in range(10):
        cluster.round(0, 1, 2)
        assert Release(3) in cluster.push(3, compute_s=0.1, transfer_s=1.0)


def test_transfers_have_a_detector_of_their_own():
    cluster = Cluster('flexible(transfer="running-average(threshold=50)")')
    for _ in range(3):
        cluster.round()
    cluster.round(0, 1, 2)
    assert Release(3) in cluster.push(3, transfer_s=2.0)


def test_if_all_workers_are_slow_at_once_none_is_left_out():
    cluster = Cluster()
    for _ in range(3):
        cluster.round()
    cluster.t += 10
    assert cluster.push(0, compute_s=10.0) == [Wake(pytest.approx(cluster.t + 1.65))]
    cluster.t += 0.5
    for worker in (1, 2):
        assert cluster.push(worker, compute_s=10.5) == []
    assert cluster.push(3, compute_s=10.5)[1:] == [Release(worker) for worker in range(4)]
    assert cluster.left_out == 0


def test_worker_within_its_usual_remaining_time_is_not_late():
    cluster = Cluster()
    for _ in range(10):
        cluster.t += 2.0
        cluster.round()
    released = cluster.t
    cluster.t += 2.0
    assert cluster.round(0) == [Wake(pytest.approx(released + 1.65 + 2.0))]


def test_if_only_left_out_workers_remain_they_are_taken_back():
    cluster = Cluster()
    cluster.leave_out_the_last(compute_s=5.0)
    for worker in range(3):
        cluster.rule.leave(worker, cluster.t)
    assert cluster.left_out == 0
    assert cluster.push(3, kind="ask", compute_s=5.0) == [Invite(3)]
    assert _parts(cluster.push(3)) == [3]


def test_a_worker_taken_back_while_computing_gets_a_new_deadline():
    cluster = Cluster()
    for _ in range(3):
        cluster.round()
    cluster.round(0, 1, 2)
    cluster.rule.tick(cluster.t + 1.0)
    for worker in range(3):
        cluster.rule.leave(worker, cluster.t)
    cluster.rule.join(0, cluster.t)
    late_t = cluster.t + 1.65
    cluster.round(0)
    assert isinstance(cluster.push(3, compute_s=2.0)[0], Drop)
    assert cluster.rule.tick(late_t) == [Wake(pytest.approx(cluster.t + 1.65))]
    cluster.t += 1.0
    assert cluster.push(3, kind="ask") == [Invite(3)]
    assert _parts(cluster.push(3, kind="delta")) == [0, 3]


def test_members_wait_for_joining_workers_and_not_for_those_that_left():
    cluster = Cluster()
    cluster.round()
    cluster.rule.leave(3, cluster.t)
    assert _parts(cluster.round(0, 1, 2)) == [0, 1, 2]
    cluster.rule.join(3, cluster.t)
    assert cluster.round(0, 1, 2) == []
    assert _parts(cluster.push(3)) == [0, 1, 2, 3]


def test_a_worker_that_was_away_for_long_is_not_late():
    run = play(
        POLICIES.build("flexible"), CLUSTER, [[1.0] * 40] * 3 + [[1.0] * 5 + [Away(20.5)] + [1.0] * 9]
    )
    assert decided(run, Drop) == []
    assert decided(run, Invite) == []


@pytest.mark.parametrize(
    "text",
    [
        "flexible(retry=0)",
        "flexible(detector=luck)",
        "flexible(transfer=luck)",
        'flexible(detector="median-mad(floor=0)")',
        'flexible(transfer="sliding-window(0)")',
    ],
)
def test_invalid_options_are_refused_with_a_fix(text):
    with pytest.raises(ConfigError) as refused:
        POLICIES.build(text)
    assert refused.value.fix


def test_without_a_server_it_is_refused():
    with pytest.raises(ConfigError, match="there is none"):
        POLICIES.build("flexible").check(ClusterInfo(workers=4))
