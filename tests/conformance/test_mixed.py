"""Every registered policy by which workers average weights, against the contract of `sync/families/mix.py`.

A new policy is tested with its defaults by being added; VARIANTS adds other settings.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.sync.families.mix import Average, Averaging, MixPolicy, Neighbours
from echelon.sync.policy import POLICIES, ClusterInfo
from strategies import Registered

VARIANTS = [
    "local(3)",
    "local(periods=[2, 6])",
    "local(periods=[1, 4], outer_lr=0.7, outer_momentum=0.9, nesterov=true)",
    "local(2, outer_momentum=0.5)",
    "elastic-averaging(0.05, period=3)",
    "gossip(torus, period=2)",
    "gossip(random)",
    "gossip(complete)",
    "gossip(matching)",
]
STEPS = 13


def _mixed() -> dict[str, MixPolicy]:
    """All of them, by their option text."""
    built = {name: Registered(POLICIES, name).build() for name in POLICIES.names()}
    built |= {text: POLICIES.build(text) for text in VARIANTS}
    resolved = {text: policy.resolved() for text, policy in built.items()}
    return {text: policy for text, policy in resolved.items() if isinstance(policy, MixPolicy)}


MIXED = _mixed()
every_policy = pytest.mark.parametrize("policy", MIXED.values(), ids=MIXED)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterInfo:
    """Two to ten workers, in two groups or more."""
    workers = draw(st.integers(2, 10))
    order = draw(st.permutations(range(workers)))
    cuts = draw(st.sets(st.integers(1, workers - 1), min_size=1))
    bounds = [0, *sorted(cuts), workers]
    groups = tuple(tuple(sorted(order[start:stop])) for start, stop in pairwise(bounds))
    return ClusterInfo(workers=workers, groups=groups, seed=draw(st.integers(0, 5)))


def test_the_mixed_policies_of_the_project_are_among_those_tested():
    assert {"none", "local", "gossip", "elastic-averaging", *VARIANTS} <= set(MIXED)


@every_policy
@settings(max_examples=20, deadline=None)
@given(cluster=clusters())
def test_averaging_is_mutual(policy, cluster):
    policy.check(cluster)
    for step in range(STEPS):
        averagings = [policy.averaging(step, rank, cluster) for rank in range(cluster.workers)]
        for rank, averaging in enumerate(averagings):
            _agrees(rank, averaging, averagings)


def _agrees(rank: int, averaging: Averaging | None, averagings: list[Averaging | None]) -> None:
    if isinstance(averaging, Average):
        assert rank in averaging.members
        assert len(set(averaging.members)) == len(averaging.members)
        assert all(averagings[other] == averaging for other in averaging.members)
    if isinstance(averaging, Neighbours):
        assert rank in averaging.weights
        assert sum(averaging.weights.values()) == pytest.approx(1)
        assert all(weight > 0 for weight in averaging.weights.values())
        for other, weight in averaging.weights.items():
            theirs = averagings[other]
            assert isinstance(theirs, Neighbours)
            assert theirs.weights[rank] == pytest.approx(weight)


@every_policy
@settings(max_examples=10, deadline=None)
@given(cluster=clusters())
def test_the_schedule_depends_only_on_the_steps_number(policy, cluster):
    forwards = [policy.averaging(step, 0, cluster) for step in range(STEPS)]
    backwards = [policy.averaging(step, 0, cluster) for step in reversed(range(STEPS))]
    assert forwards == backwards[::-1]


@every_policy
def test_shown_center_starts_as_a_copy_of_the_weights(policy):
    own, memory = torch.arange(4.0), {}
    policy.start(own, memory)
    assert policy.shown in ("mean", "own", "center")
    if policy.shown == "center":
        assert torch.equal(memory["center"], own)
    for kept in memory.values():
        assert kept.data_ptr() != own.data_ptr(), "memory must not share storage with the weights"
        assert kept.shape == own.shape


def _settled(
    policy: MixPolicy, begin: torch.Tensor, own: torch.Tensor, mean: torch.Tensor
) -> list[torch.Tensor]:
    """A worker's weights, its memory, and the mean, after two averages of all workers."""
    cluster, memory = ClusterInfo(workers=3), {}
    policy.start(begin, memory)
    own, mean = own.clone(), mean.clone()
    for _ in range(2):
        policy.settle(own, mean, memory, Average((0, 1, 2)), cluster)
    return [own, mean, *(memory[name] for name in sorted(memory))]


@every_policy
def test_settle_is_element_wise_and_leaves_the_mean_unchanged(policy):
    begin, own, mean = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = _settled(policy, begin, own, mean)
    halves = [_settled(policy, begin[half], own[half], mean[half]) for half in (slice(0, 3), slice(3, 8))]
    assert torch.equal(whole[1], mean)
    for at, tensor in enumerate(whole):
        torch.testing.assert_close(tensor, torch.cat([half[at] for half in halves]))


@every_policy
def test_averaging_equal_weights_changes_nothing(policy):
    begin = torch.tensor([1.0, -2.0, 0.25])
    for tensor in _settled(policy, begin, begin, begin)[:2]:
        torch.testing.assert_close(tensor, begin)


@every_policy
def test_members_of_an_average_keep_the_same_center(policy):
    begin, one, other, mean = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    mine, theirs = _settled(policy, begin, one, mean), _settled(policy, begin, other, mean)
    for left, right in zip(mine[1:], theirs[1:], strict=True):
        assert torch.equal(left, right)
