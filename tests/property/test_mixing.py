"""Averaged weights against independently written recurrences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.sync.families.mix import Average, MixPolicy
from echelon.sync.families.serve import Apply, Arrival, Release
from echelon.sync.families.shard import Push, ShardState
from echelon.sync.graph import GRAPHS
from echelon.sync.policy import POLICIES, ClusterInfo
from spectral import spectral_gap

STATIC = ["ring", "torus", "random", "random(degree=4, seed=3)", "complete", "edges"]
values = st.floats(-100, 100).map(lambda value: round(value, 3))
sizes = st.integers(2, 12)


def _graph(name: str, workers: int) -> str:
    """The graph as an option of gossip; `edges` is a star with a tail."""
    if name != "edges":
        return name
    star = [f"0-{rank}" for rank in range(1, max(2, workers - 1))]
    tail = [f"{workers - 2}-{workers - 1}"] if workers > 2 else []
    return f'edges("{", ".join(star + tail)}")'


def _mixing(graph: str, workers: int, step: int = 0) -> np.ndarray:
    """The mixing matrix of gossip after a step."""
    policy, cluster = POLICIES.build(f"gossip({graph})"), ClusterInfo(workers=workers)
    policy.check(cluster)
    matrix = np.eye(workers)
    for rank in range(workers):
        averaging = policy.averaging(step, rank, cluster)
        if averaging is not None:
            matrix[rank] = [averaging.weights.get(other, 0.0) for other in range(workers)]
    return matrix


def _spread(x: np.ndarray) -> float:
    return float(np.linalg.norm(x - x.mean()))


def test_every_static_graph_is_covered_by_this_file():
    static = {name for name in GRAPHS.names() if GRAPHS.get(name).static}
    assert static <= {text.partition("(")[0] for text in STATIC}


@pytest.mark.parametrize("name", STATIC)
@settings(max_examples=25, deadline=None)
@given(workers=sizes, data=st.data())
def test_gossip_keeps_the_mean_and_contracts_the_spread_by_the_spectral_gap(name, workers, data):
    graph = _graph(name, workers)
    mixing = _mixing(graph, workers)
    x = np.array(data.draw(st.lists(values, min_size=workers, max_size=workers)))
    gap = spectral_gap(GRAPHS.build(graph).neighbours(workers, 0))
    assert gap > 1e-3
    for _ in range(5):
        mixed = mixing @ x
        assert mixed.mean() == pytest.approx(x.mean(), abs=1e-9)
        assert _spread(mixed) <= (1 - gap) * _spread(x) + 1e-9
        x = mixed


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("workers", range(2, 13))
def test_the_contraction_by_the_spectral_gap_is_tight(name, workers):
    graph = _graph(name, workers)
    mixing = _mixing(graph, workers)
    _, stretches, directions = np.linalg.svd(mixing - 1 / workers)
    gap = spectral_gap(GRAPHS.build(graph).neighbours(workers, 0))
    assert stretches[0] == pytest.approx(1 - gap, abs=1e-9)
    slowest = directions[0] - directions[0].mean()
    assert _spread(mixing @ slowest) == pytest.approx((1 - gap) * _spread(slowest), abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(workers=sizes, step=st.integers(0, 10**6), data=st.data())
def test_random_pairs_keep_the_mean_and_never_widen_the_spread(workers, step, data):
    x = np.array(data.draw(st.lists(values, min_size=workers, max_size=workers)))
    mixed = _mixing("matching", workers, step) @ x
    assert mixed.mean() == pytest.approx(x.mean(), abs=1e-9)
    assert _spread(mixed) <= _spread(x) + 1e-9


@pytest.mark.parametrize("workers", range(2, 13))
def test_random_pairs_halve_the_squared_spread_on_average(workers):
    x = np.arange(workers) - (workers - 1) / 2
    left = [_spread(_mixing("matching", workers, step) @ x) ** 2 for step in range(300)]
    assert np.mean(left) <= 0.5 * 1.15 * _spread(x) ** 2


def _meet(policy: MixPolicy, workers: list[torch.Tensor], memories: list[dict[str, torch.Tensor]]) -> None:
    """Average all workers, as the runtime does."""
    cluster = ClusterInfo(workers=len(workers))
    mean = torch.stack(workers).mean(0)
    for own, memory in zip(workers, memories, strict=True):
        policy.settle(own, mean.clone(), memory, Average(tuple(range(len(workers)))), cluster)


def _begin(policy: MixPolicy, count: int, start: float) -> tuple[list[torch.Tensor], list[dict]]:
    workers = [torch.full((2,), start, dtype=torch.float64) for _ in range(count)]
    memories: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for own, memory in zip(workers, memories, strict=True):
        policy.start(own, memory)
    return workers, memories


targets = st.lists(values, min_size=2, max_size=6)
curvature = st.sampled_from([0.5, 1.0, 2.0])
LR = 0.1


@settings(max_examples=40, deadline=None)
@given(targets, curvature, values, st.integers(1, 4), st.sampled_from([None, 0.05, 0.15]))
def test_synchronous_elastic_averaging_equals_its_recurrence(goals, bend, start, period, alpha):
    count = len(goals)
    given_alpha = "none" if alpha is None else alpha
    policy = POLICIES.build(f"elastic-averaging({given_alpha}, period={period})").resolved()
    policy.check(ClusterInfo(workers=count))
    workers, memories = _begin(policy, count, start)
    alpha = 0.9 / count if alpha is None else alpha
    xs, center = [start] * count, start
    for step in range(12):
        xs = [x - LR * bend * (x - goal) for x, goal in zip(xs, goals, strict=True)]
        for own, goal in zip(workers, goals, strict=True):
            own.sub_(LR * bend * (own - goal))
        met = policy.averaging(step, 0, ClusterInfo(workers=count)) is not None
        assert met == ((step + 1) % period == 0)
        if met:
            pulls = [alpha * (x - center) for x in xs]
            xs = [x - pull for x, pull in zip(xs, pulls, strict=True)]
            center = center + sum(pulls)
            _meet(policy, workers, memories)
        for own, memory, x in zip(workers, memories, xs, strict=True):
            assert own.tolist() == pytest.approx([x, x], abs=1e-8)
            assert memory["center"].tolist() == pytest.approx([center, center], abs=1e-8)


@settings(max_examples=40, deadline=None)
@given(targets, curvature, values, st.integers(1, 4), st.sampled_from([0.05, 0.3, 0.9]), st.data())
def test_asynchronous_elastic_averaging_equals_its_recurrence(goals, bend, start, period, alpha, data):
    count = len(goals)
    comers = data.draw(st.lists(st.integers(0, count - 1), max_size=15))
    policy = POLICIES.build(f"elastic-averaging({alpha}, {period}, asynchronous=true)").resolved()
    rule = policy.rule(ClusterInfo(workers=count, servers=1))
    flat = torch.full((2,), start, dtype=torch.float64)
    shard = ShardState(
        policy, flat, [flat], lambda: pytest.fail("the server's optimizer has nothing to do")
    )
    workers = [torch.full((2,), start, dtype=torch.float64) for _ in goals]
    xs, center, arrivals = [start] * count, start, [0] * count
    for rank in comers:
        for _ in range(policy.push_every):
            workers[rank] = workers[rank] - LR * bend * (workers[rank] - goals[rank])
            xs[rank] -= LR * bend * (xs[rank] - goals[rank])
        pull = alpha * (xs[rank] - center)
        xs[rank], center = xs[rank] - pull, center + pull

        step = arrivals[rank]
        arrivals[rank] += 1
        shard.push(rank, step, Push(policy.pushes, workers[rank], [True]))
        for decision in rule.arrive(Arrival(worker=rank, step=step, t=0.0, kind=policy.pushes)):
            if isinstance(decision, Apply):
                shard.apply(decision.parts)
            else:
                assert decision == Release(rank)
                workers[rank] = shard.read(rank)
        assert workers[rank].tolist() == pytest.approx([xs[rank]] * 2, abs=1e-8)
        assert shard.flat.tolist() == pytest.approx([center] * 2, abs=1e-8)
    assert shard.waiting == 0
    assert shard.version == len(comers)


@settings(max_examples=40, deadline=None)
@given(
    targets,
    curvature,
    values,
    st.sampled_from([0.3, 1.0, 1.5]),
    st.sampled_from([0.2, 0.5, 0.9]),
    st.booleans(),
)
def test_block_momentum_equals_its_recurrence(goals, bend, start, rate, momentum, ahead):
    """Chen and Huo: W <- W + D; workers continue from W, or with Nesterov from W + momentum D."""
    nesterov = str(ahead).lower()
    policy = POLICIES.build(f"local(2, outer_lr={rate}, outer_momentum={momentum}, nesterov={nesterov})")
    workers, memories = _begin(policy, len(goals), start)
    model = begin = start
    filtered = 0.0
    for _ in range(6):
        xs = [begin] * len(goals)
        for _ in range(2):
            xs = [x - LR * bend * (x - goal) for x, goal in zip(xs, goals, strict=True)]
            for own, goal in zip(workers, goals, strict=True):
                own.sub_(LR * bend * (own - goal))
        filtered = momentum * filtered + rate * (sum(xs) / len(xs) - begin)
        model = model + filtered
        begin = model + momentum * filtered if ahead else model
        _meet(policy, workers, memories)
        for own, memory in zip(workers, memories, strict=True):
            assert own.tolist() == pytest.approx([begin, begin], rel=1e-9, abs=1e-8)
            assert memory["center"].tolist() == own.tolist()


@settings(max_examples=40, deadline=None)
@given(targets, values, st.sampled_from([0.3, 0.7, 1.0]), st.sampled_from([0.5, 0.9]), st.booleans())
def test_diloco_is_torchs_sgd_with_gradient_center_minus_mean(goals, start, rate, momentum, ahead):
    nesterov = str(ahead).lower()
    policy = POLICIES.build(f"local(3, outer_lr={rate}, outer_momentum={momentum}, nesterov={nesterov})")
    workers, memories = _begin(policy, len(goals), start)
    center = torch.full((2,), start, dtype=torch.float64, requires_grad=True)
    outer = torch.optim.SGD([center], lr=rate, momentum=momentum, nesterov=ahead)
    for _ in range(6):
        for own, goal in zip(workers, goals, strict=True):
            for _ in range(3):
                own.sub_(LR * (own - goal))
        center.grad = center.detach() - torch.stack(workers).mean(0)
        outer.step()
        _meet(policy, workers, memories)
        for own in workers:
            torch.testing.assert_close(own, center.detach(), rtol=1e-9, atol=1e-8)
