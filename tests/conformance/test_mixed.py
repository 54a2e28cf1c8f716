"""Every registered policy that workers carry out among themselves, against the contract of `sync/mixed.py`.

A new policy is tested with its defaults by being added; VARIANTS adds settings that behave otherwise.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.sync.families.mix import Average, Meeting, MixPolicy, Neighbours
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
    """All of them, by what they are asked for as."""
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
def test_whoever_a_worker_meets_meets_it_too(policy, cluster):
    policy.check(cluster)
    for step in range(STEPS):
        meetings = [policy.meeting(step, rank, cluster) for rank in range(cluster.workers)]
        for rank, meeting in enumerate(meetings):
            _agrees(rank, meeting, meetings)


def _agrees(rank: int, meeting: Meeting | None, meetings: list[Meeting | None]) -> None:
    if isinstance(meeting, Average):
        assert rank in meeting.members
        assert len(set(meeting.members)) == len(meeting.members)
        assert all(meetings[other] == meeting for other in meeting.members)
    if isinstance(meeting, Neighbours):
        assert rank in meeting.weights
        assert sum(meeting.weights.values()) == pytest.approx(1)
        assert all(weight > 0 for weight in meeting.weights.values())
        for other, weight in meeting.weights.items():
            theirs = meetings[other]
            assert isinstance(theirs, Neighbours)
            assert theirs.weights[rank] == pytest.approx(weight)


@every_policy
@settings(max_examples=10, deadline=None)
@given(cluster=clusters())
def test_the_schedule_depends_on_the_number_of_the_step_alone(policy, cluster):
    forwards = [policy.meeting(step, 0, cluster) for step in range(STEPS)]
    backwards = [policy.meeting(step, 0, cluster) for step in reversed(range(STEPS))]
    assert forwards == backwards[::-1]


@every_policy
def test_a_center_is_kept_from_the_start_if_it_is_what_is_shown(policy):
    own, memory = torch.arange(4.0), {}
    policy.start(own, memory)
    assert policy.shown in ("mean", "own", "center")
    if policy.shown == "center":
        assert torch.equal(memory["center"], own)
    for kept in memory.values():
        assert kept.data_ptr() != own.data_ptr(), "what is remembered changes with the worker's weights"
        assert kept.shape == own.shape


def _settled(
    policy: MixPolicy, begin: torch.Tensor, own: torch.Tensor, mean: torch.Tensor
) -> list[torch.Tensor]:
    """A worker's weights, what it remembers, and the mean, after two meetings of all."""
    cluster, memory = ClusterInfo(workers=3), {}
    policy.start(begin, memory)
    own, mean = own.clone(), mean.clone()
    for _ in range(2):
        policy.settle(own, mean, memory, Average((0, 1, 2)), cluster)
    return [own, mean, *(memory[name] for name in sorted(memory))]


@every_policy
def test_settling_goes_element_by_element_and_leaves_the_mean(policy):
    begin, own, mean = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = _settled(policy, begin, own, mean)
    halves = [_settled(policy, begin[half], own[half], mean[half]) for half in (slice(0, 3), slice(3, 8))]
    assert torch.equal(whole[1], mean)
    for at, tensor in enumerate(whole):
        torch.testing.assert_close(tensor, torch.cat([half[at] for half in halves]))


@every_policy
def test_where_all_agree_and_nobody_moved_a_meeting_changes_nothing(policy):
    begin = torch.tensor([1.0, -2.0, 0.25])
    for tensor in _settled(policy, begin, begin, begin)[:2]:
        torch.testing.assert_close(tensor, begin)


@every_policy
def test_who_met_remembers_the_same_center(policy):
    begin, one, other, mean = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    mine, theirs = _settled(policy, begin, one, mean), _settled(policy, begin, other, mean)
    for left, right in zip(mine[1:], theirs[1:], strict=True):
        assert torch.equal(left, right)
