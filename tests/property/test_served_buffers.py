"""In any order of arrivals, weights are never too old, K grows to the number of workers, no push is lost,
and policies that wait for all workers equal one process.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arrivals import decided, play
from echelon.sync.families.serve import Apply, Drop, Release
from echelon.sync.families.shard import Push, ShardState
from echelon.sync.policies.backup import Backup
from echelon.sync.policies.bounded_delay import BoundedDelay
from echelon.sync.policies.delay_compensated import DelayCompensated
from echelon.sync.policies.smooth_switch import SmoothSwitch
from echelon.sync.policy import POLICIES, ClusterInfo

LR = 0.05


@st.composite
def clusters(draw, most_steps=12, equal_steps=False):
    """Workers, and how long each computes for each of its steps."""
    workers = draw(st.integers(1, 6))
    steps = draw(st.integers(1, most_steps))
    counts = [steps if equal_steps else draw(st.integers(0, steps)) for _ in range(workers)]
    slow = st.integers(1, 9).map(float)
    times = [draw(st.lists(slow, min_size=count, max_size=count)) for count in counts]
    return ClusterInfo(workers=workers, servers=1, lr=LR), times


# Bounded delay ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(clusters(), st.integers(0, 4))
def test_workers_read_weights_within_the_bound_and_wait_only_if_needed(cluster_times, bound):
    cluster, times = cluster_times
    made = dict.fromkeys(range(cluster.workers), 0)
    applied = dict.fromkeys(range(cluster.workers), 0)
    held = set()
    for told in play(BoundedDelay(bound=bound), cluster, times):
        if told.what == "arrive":
            made[told.worker] += 1
            held.add(told.worker)
        elif told.what == "leave":
            del made[told.worker]
        for decision in told.decisions:
            if isinstance(decision, Apply):
                for part in decision.parts:
                    assert part.step == applied[part.worker]
                    applied[part.worker] += 1
            if isinstance(decision, Release):
                held.remove(decision.worker)
                step = made[decision.worker]  # the step that it reads weights for
                assert all(applied[other] >= step - bound for other in made)
        assert all(made[worker] - min(made.values()) > bound for worker in held)


@settings(max_examples=50, deadline=None)
@given(clusters(), st.integers(0, 4))
def test_gradients_are_applied_only_before_a_worker_reads(cluster_times, bound):
    cluster, times = cluster_times
    for told in play(BoundedDelay(bound=bound), cluster, times):
        kinds = [type(decision) for decision in told.decisions]
        assert kinds in ([], [Release] * len(kinds), [Apply] + [Release] * (len(kinds) - 1))
        assert kinds != [Apply]


# The buffer -------------------------------------------------------------------------------------

THRESHOLD = st.one_of(
    st.integers(1, 8).map(lambda size: f"step({size})"),
    st.sampled_from(["linear(0.3)", "exponential(5)", "sigmoid(10, 2)"]),
    st.integers(1, 5).map(lambda warmup: f"noise(warmup={warmup})"),
)


@settings(max_examples=100, deadline=None)
@given(clusters(equal_steps=True), THRESHOLD, st.booleans(), st.integers(1, 6))
def test_k_never_decreases_and_every_update_has_k_gradients_while_no_worker_leaves(
    cluster_times, threshold, waiting, start
):
    cluster, times = cluster_times
    policy = SmoothSwitch(threshold=threshold, waiting=waiting, start=min(start, cluster.workers))
    k = 0
    for told in play(policy, cluster, times):
        if told.what == "leave":
            break  # from here on there are fewer workers
        assert k <= told.state["K"] <= cluster.workers
        k = told.state["K"]
        assert k >= policy.start
        assert [len(d.parts) for d in told.decisions if isinstance(d, Apply)] in ([], [k])
        assert told.state["buffered"] < k


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.sampled_from(["step(3)", "linear(0.3)", "exponential(5)", "sigmoid(10, 2)"]))
def test_k_reaches_the_number_of_workers_and_stays_there(workers, threshold):
    cluster = ClusterInfo(workers=workers, servers=1)
    story = play(SmoothSwitch(threshold=threshold), cluster, [[1.0] * 25] * workers)
    ks = [told.state["K"] for told in story if told.what == "arrive"]
    assert set(ks[20:]) == {workers}
    assert ks[0] <= 2


# Nothing gets lost ------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(clusters(), st.integers(0, 5))
def test_backup_applies_or_drops_each_gradient_once_and_applies_only_fresh_ones(cluster_times, spares):
    cluster, times = cluster_times
    story = play(Backup(spares=min(spares, cluster.workers - 1)), cluster, times)
    read = {(t.worker, t.arrival.step): t.arrival.read for t in story if t.arrival}
    updates = decided(story, Apply)
    for version, update in enumerate(updates):
        assert {read[part.worker, part.step] for part in update.parts} == {version}
        assert sum(part.weight for part in update.parts) == pytest.approx(1)
    applied = [(part.worker, part.step) for update in updates for part in update.parts]
    dropped = [(drop.worker, drop.step) for drop in decided(story, Drop)]
    assert sorted(applied + dropped) == sorted(read)
    if not spares:
        assert not dropped


# As one process ---------------------------------------------------------------------------------

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=LR),
}


def _problem(workers):
    """Least squares; each worker has its own data."""
    draw = torch.Generator().manual_seed(3)
    data = [torch.randn(4 + n, 3, generator=draw, dtype=torch.float64) for n in range(workers)]
    return data, [part.sum(1) for part in data]


def _gradient(data, target, weights):
    return data.T @ (data @ weights - target) / len(data)


def _carried_out(policy, story, optimizer, data, targets):
    """The weights of a shard after all decisions of a story."""
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    shard = ShardState(policy, parameter.data, [parameter], OPTIMIZERS[optimizer]([parameter]).step)
    holds = [shard.read(worker) for worker in range(len(data))]
    for told in story:
        if told.arrival:
            w = told.worker
            gradient = _gradient(data[w], targets[w], holds[w])
            shard.push(w, told.arrival.step, Push("gradient", gradient, [True]))
        for decision in told.decisions:
            if isinstance(decision, Apply):
                shard.apply(decision.parts)
            elif isinstance(decision, Drop):
                shard.drop(decision.worker, decision.step)
            elif isinstance(decision, Release):
                holds[decision.worker] = shard.read(decision.worker)
    assert shard.waiting == 0
    return shard.flat


def _alone(steps, optimizer, data, targets):
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    stepping = OPTIMIZERS[optimizer]([parameter])
    for _ in range(steps):
        parameter.grad = _gradient(torch.cat(data), torch.cat(targets), parameter.data)
        stepping.step()
    return parameter.data


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("text", ["bounded-delay(0)", "backup(0)", "smooth-switch(start={}, waiting=true)"])
@settings(max_examples=12, deadline=None)
@given(cluster_times=clusters(most_steps=6, equal_steps=True))
def test_synchronous_policies_equal_one_process(text, optimizer, cluster_times):
    cluster, times = cluster_times
    data, targets = _problem(cluster.workers)
    policy = POLICIES.build(text.format(cluster.workers))
    story = play(policy, cluster, times, samples=[float(len(part)) for part in data])
    got = _carried_out(policy, story, optimizer, data, targets)
    torch.testing.assert_close(got, _alone(len(times[0]), optimizer, data, targets))


@settings(max_examples=20, deadline=None)
@given(clusters(most_steps=6), st.sampled_from([0.0, 0.04, 1.0]), st.booleans())
def test_delay_compensation_equals_its_recurrence_for_any_delays(cluster_times, strength, adaptive):
    cluster, times = cluster_times
    data, targets = _problem(cluster.workers)
    policy = DelayCompensated(strength=strength, adaptive=adaptive)
    story = play(policy, cluster, times)
    w, square, speed = (torch.zeros(3, dtype=torch.float64) for _ in range(3))
    read = [w] * cluster.workers
    for told in story:
        if told.arrival:
            g = _gradient(data[told.worker], targets[told.worker], read[told.worker])
            square = 0.95 * square + 0.05 * g * g
            by = strength / torch.sqrt(square + 1e-7) if adaptive else strength
            speed = 0.9 * speed + (g + by * g * g * (w - read[told.worker]))
            w = w - LR * speed
            read[told.worker] = w
    torch.testing.assert_close(_carried_out(policy, story, "momentum", data, targets), w)
