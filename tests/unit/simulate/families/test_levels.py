"""Groups that act as one worker, and averages on two levels."""

from dataclasses import replace

import pytest
import torch

from echelon.errors import ConfigError
from echelon.observe.events import Arrived, Decided
from echelon.simulate.learner import Learner
from echelon.simulate.profile import VirtualLink
from echelon.simulate.replay import replay
from echelon.simulate.run import simulate
from echelon.simulate.virtual import cluster_of
from echelon.sync.policies.levels import Levels, units_of
from echelon.sync.policy import POLICIES

PAIRS = ((0, 1), (2, 3))
UNEQUAL = ((0,), (1, 2, 3))


@pytest.fixture
def slow_link(problem):
    """A latency of 0.1 s, and one second for a model."""
    return VirtualLink(latency_s=0.1, bytes_per_s=Learner(problem, 0).size_bytes)


@pytest.mark.parametrize("groups", [PAIRS, ((0, 3), (1, 2)), UNEQUAL])
@pytest.mark.parametrize("outer", ["backup(0)", "bounded-delay(0)", "percentage(1.0)", "local(1)"])
def test_full_inside_and_lockstep_between_equal_one_process(setting, play, plainly, groups, outer):
    setting = replace(
        setting, groups=groups, momentum=0.9, delay="uniform(0, 0.02)", speeds=(1.0, 0.5, 0.25, 1.0)
    )
    played = play(setting, f"levels(full, {outer})")
    updates = played.totals.updates
    assert updates >= 5
    assert played.totals.applied == 4 * updates
    assert played.totals.staleness_max == 0
    assert torch.allclose(played.weights[0], plainly(setting, 16, updates), atol=1e-5)
    assert not torch.allclose(played.weights[0], plainly(setting, 16, updates - 1), atol=1e-4)


def test_levels_that_are_both_full_run_as_full(setting, play):
    setting = replace(setting, groups=PAIRS)
    played = play(setting, Levels(inner="full", outer="full"))
    assert torch.equal(played.weights[0], play(setting, "full").weights[0])


def test_async_between_groups_applies_every_gradient_once_and_is_reproducible(setting, play):
    setting = replace(setting, groups=UNEQUAL, delay="normal(0, 0.02)", speeds=(0.5, 1.0, 0.7, 1.0))
    played, again = play(setting, "levels(full, async)"), play(setting, "levels(full, async)")
    assert played.events == again.events
    assert torch.equal(played.weights[0], again.weights[0])
    arrivals = played.of(Arrived)
    applied = [(part[0], part[1]) for event in played.of(Decided) for part in event.parts]
    assert {arrival.worker for arrival in arrivals} == {0, 1}
    assert {(arrival.worker, arrival.samples) for arrival in arrivals} == {(0, 4.0), (1, 12.0)}
    assert applied == [(arrival.worker, arrival.step) for arrival in arrivals]
    assert len(set(applied)) == len(applied) > 10
    assert played.totals.applied == sum(3 if worker else 1 for worker, _ in applied)
    assert played.totals.applied <= played.totals.gradients <= played.totals.applied + 4
    assert played.totals.dropped == 0


def test_a_dropped_push_counts_the_gradients_of_all_members(with_profile, free, play):
    setting = with_profile(free, groups=UNEQUAL, speeds=(1.0, 0.9, 0.9, 0.9), seconds=4.95)
    totals = play(setting, "levels(full, backup(1))").totals
    assert totals.dropped % 3 == 0
    assert totals.dropped > 0
    assert totals.applied == totals.updates


def test_a_group_waits_for_its_slowest_member(with_profile, free, play):
    setting = with_profile(free, groups=((0, 2), (1, 3)), speeds=(1.0, 1.0, 0.25, 0.5), seconds=9)
    arrivals = play(setting, "levels(full, async)").of(Arrived)
    assert [arrival.t for arrival in arrivals if arrival.worker == 0] == [4.0, 8.0]
    assert [arrival.t for arrival in arrivals if arrival.worker == 1] == [2.0, 4.0, 6.0, 8.0]
    assert {arrival.compute_s for arrival in arrivals if arrival.worker == 0} == {4.0}


def test_group_reduces_before_a_push_and_broadcasts_after_a_pull(with_profile, free, play, slow_link):
    profile = replace(free, link=slow_link)
    setting = with_profile(profile, groups=PAIRS, links=(slow_link.bytes_per_s,) * 4, seconds=9)
    arrivals = play(setting, "levels(full, async)").of(Arrived)
    # 1 s to compute, 1.2 s for a ring of two, 1.1 s there and 1.1 s back, 1.1 s to the other member
    assert [arrival.t for arrival in arrivals] == pytest.approx([3.3, 3.3, 8.8, 8.8])
    assert [arrival.compute_s for arrival in arrivals] == pytest.approx([2.2, 2.2, 3.3, 3.3])


@pytest.mark.parametrize(("slow", "arrives_s"), [(1, 1 + 1.2 + 1.1), (0, 1 + 1.2 + 0.1)])
def test_the_first_member_communicates_for_the_group(with_profile, free, play, slow_link, slow, arrives_s):
    links = tuple(slow_link.bytes_per_s if rank == slow else 1e30 for rank in range(4))
    setting = with_profile(replace(free, link=slow_link), groups=((1, 0), (2, 3)), links=links, seconds=4)
    arrivals = play(setting, "levels(full, async)").of(Arrived)
    first = {arrival.worker: arrival.t for arrival in reversed(arrivals)}
    assert first == pytest.approx({0: arrives_s, 1: 1 + 0.2 + 0.1})


def test_groups_that_average_are_workers_with_larger_batches(with_profile, free, play):
    groups = with_profile(free, groups=PAIRS, momentum=0.5, seconds=7.5)
    single = with_profile(free, workers=2, batch=8, momentum=0.5, seconds=7.5)
    for policy in ("local(2)", "gossip", "elastic-averaging(period=2)", "local(3, outer_momentum=0.5)"):
        played, expected = play(groups, f'levels(full, "{policy}")'), play(single, policy)
        assert played.totals.updates == expected.totals.updates > 0
        assert played.totals.applied == 2 * expected.totals.applied
        for weights, other in zip(played.weights, expected.weights, strict=True):
            assert torch.allclose(weights, other, atol=1e-6)


def test_average_between_unequal_groups_is_by_samples(with_profile, free, play, problem):
    setting = with_profile(free, groups=UNEQUAL, seconds=2.5)
    played = play(setting, "levels(full, local(2))")
    learner = Learner(problem, 0)
    ends = []
    for group in UNEQUAL:
        flat = learner.initial()
        for step in range(2):
            batch = torch.cat([played.begun[rank][step] for rank in group])
            flat = flat - setting.lr * learner.gradient_at(flat, batch)[0]
        ends.append(flat)
    assert torch.allclose(played.weights[0], 0.25 * ends[0] + 0.75 * ends[1], atol=1e-6)


@pytest.mark.parametrize("groups", [PAIRS, UNEQUAL])
@pytest.mark.parametrize("seconds", [3.5, 4.5, 11.5])
def test_local_inside_and_between_is_local_with_two_periods(with_profile, free, play, groups, seconds):
    setting = with_profile(free, groups=groups, momentum=0.9, seconds=seconds)
    played = play(setting, "levels(local(2), local(4))")
    expected = play(setting, "local(periods=[2, 4])")
    assert played.totals.applied == expected.totals.applied == 4 * int(seconds)
    assert torch.allclose(played.weights[0], expected.weights[0], atol=1e-6)
    assert not torch.allclose(played.weights[0], play(setting, "local(4)").weights[0], atol=1e-5)


def test_members_continue_independently_until_groups_average(with_profile, free, play):
    setting = with_profile(free, groups=PAIRS, speeds=(1.0, 0.5, 1.0, 1.0), seconds=6.5)
    before = play(replace(setting, seconds=5.5, evaluate_every_s=5.5), "levels('none', local(3))")
    assert [len(begun) for begun in before.begun] == [3, 3, 3, 3]
    assert before.totals.applied == 3 + 2 + 3 + 3
    after = play(setting, "levels('none', local(3))")
    assert [len(begun) for begun in after.begun] == [4, 4, 4, 4]  # they met at 6 s
    assert after.totals.updates == 1


def test_an_average_of_groups_takes_both_rings_and_a_broadcast(with_profile, free, play, slow_link):
    setting = with_profile(replace(free, link=slow_link), groups=PAIRS, seconds=5.7, evaluate_every_s=3.3)
    policy = "levels(local(2), local(2))"
    # 2 s to compute, and 1.2 s each for the ring of the policy inside, of the group, and of both groups
    assert [point.updates for point in play(setting, policy).curve] == [0, 2, 3]
    # 1.1 s later all members begin again
    later = replace(setting, seconds=10, evaluate_every_s=9.8)
    assert [point.updates for point in play(later, policy).curve] == [0, 3, 5]


def test_groups_broadcast_after_averaging_only(with_profile, free, play, slow_link):
    setting = with_profile(replace(free, link=slow_link), groups=PAIRS, seconds=5.7, evaluate_every_s=5.5)
    # Two steps of 2.2 s and a ring of 1.2 s: 5.6 s; all begin again 1.1 s later, and meet at 12.3 s.
    assert [point.updates for point in play(setting, "levels(full, local(2))").curve] == [0, 0, 1]
    later = replace(setting, seconds=12.4, evaluate_every_s=12.2)
    assert [point.updates for point in play(later, "levels(full, local(2))").curve] == [0, 1, 2]


def test_members_get_the_outer_policys_result(with_profile, free, play, problem):
    setting = with_profile(free, groups=PAIRS, seconds=1.5)
    played = play(setting, 'levels("none", "elastic-averaging(period=1, alpha=0.25)")')
    learner = Learner(problem, 0)
    initial = learner.initial()
    own = [
        initial - setting.lr * learner.gradient_at(initial, played.begun[rank][0])[0] for rank in range(4)
    ]
    mean = sum(own) / 4
    center = initial + 2 * 0.25 * (mean - initial)  # two groups pull
    assert torch.allclose(played.weights[0], center, atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        "levels(full, async)",
        "levels(full, percentage(0.5))",
        "levels(full, flexible)",
        "levels(full, smooth-switch(step=20))",
        "levels(full, downpour(2, 2))",
        "levels(full, delay-compensated)",
        "levels(full, elastic-averaging(asynchronous=true))",
        "levels(full, local(4))",
        "levels(local(2), gossip(ring, period=4))",
        "levels(gossip(random), local(4))",
        "levels(gossip(ring, period=2), gossip(random, period=3))",
        "levels(gossip, elastic-averaging)",
    ],
)
def test_levels_learn_and_take_the_same_time_without_gradients(setting, policy):
    setting = replace(setting, lr=0.01, groups=UNEQUAL)
    run = simulate(setting, [policy]).runs[0]
    assert run.totals.applied > 20
    assert run.final.train_loss < run.curve[0].train_loss
    assert simulate(replace(setting, gradients=False), [policy]).runs[0].totals == run.totals


def test_the_record_of_groups_can_be_replayed(setting, play):
    setting = replace(setting, groups=UNEQUAL, delay="sometimes(0.3, 0.1)")
    for outer in ("percentage(0.5)", "backup(1)", "flexible"):
        events = play(setting, f"levels(full, {outer})").events
        cluster = units_of(cluster_of(setting, 0))
        assert replay(events, POLICIES.build(outer).resolved(), cluster) is None


@pytest.mark.parametrize(
    ("policy", "groups", "message"),
    [
        ("levels(full, async)", (), "two groups"),
        ("levels(full, async)", ((0, 1, 2, 3),), "two groups"),
        ("levels(full, backup(2))", PAIRS, "nobody to wait for"),
        ("levels(full, percentage(shares=[1.0, 0.5, 0.5]))", PAIRS, "3 shares are given"),
    ],
)
def test_a_wrong_number_of_groups_is_refused_before_anything_runs(setting, policy, groups, message):
    with pytest.raises(ConfigError, match=message):
        simulate(replace(setting, data="nowhere", groups=groups), [policy])


@pytest.mark.parametrize(
    "groups", [((0, 1), (2,)), ((0, 1), (1, 2, 3)), ((0, 1, 2, 3), ()), ((0, 1), (2, 4))]
)
def test_groups_that_do_not_contain_each_worker_once_are_refused(setting, groups):
    with pytest.raises(ConfigError, match="exactly once"):
        replace(setting, groups=groups)
