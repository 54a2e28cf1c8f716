"""Rounds of percentage and flexible, for any order in which workers arrive, leave and join.

`arrivals.play` fails if a rule settles a push twice or never, or leaves a worker waiting forever.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arrivals import Away, Told, decided, play
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Drop,
    Invite,
    Release,
    Rule,
    ServePolicy,
    WeightedPush,
)
from echelon.sync.families.shard import Push, ShardState
from echelon.sync.policy import POLICIES, ClusterInfo

few = settings(max_examples=60, deadline=None)

# Multiples of one duration, so that many events happen at the same time.
seconds = st.integers(1, 12).map(lambda tenths: tenths / 10) | st.just(6.0)
absences = st.integers(0, 40).map(lambda tenths: Away(tenths / 10))
busy = st.lists(seconds, min_size=12, max_size=40)
unsteady = st.lists(st.one_of(seconds, seconds, seconds, absences), max_size=30)
shares = st.sampled_from([1.0, 0.9, 0.75, 2 / 3, 0.5, 1 / 3, 0.25, 0.2, 0.1])
detectors = st.sampled_from(
    [
        "median-mad",
        "median-mad(k=0, floor=0.1, after=1)",
        "running-average(0.2, after=1)",
        "sliding-window(3)",
    ]
)
flexibles = st.builds('flexible(detector="{}", retry={})'.format, detectors, st.integers(1, 4))
transfers = st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=5, max_size=5)


@st.composite
def percentages(draw, programmes: st.SearchStrategy[list]) -> tuple[ServePolicy, list, list[float]]:
    """A policy, the programmes of its workers, and their shares."""
    each = draw(st.lists(shares, min_size=1, max_size=5))
    played = [draw(programmes) for _ in each]
    return POLICIES.build(f"percentage(shares={each})"), played, each


def _cluster(workers: int) -> ClusterInfo:
    return ClusterInfo(workers=workers, servers=1)


def _samples(workers: int) -> list[float]:
    return [1.0 + worker for worker in range(workers)]


class _Barrier(Rule):
    """The simplest full round: applies the pushes of all members by samples, then releases all."""

    def __init__(self, workers: int) -> None:
        self.active = set(range(workers))
        self.here: dict[int, Arrival] = {}

    def arrive(self, arrival):
        self.here[arrival.worker] = arrival
        return self._settle()

    def leave(self, worker, t):
        self.active.remove(worker)
        return self._settle()

    def join(self, worker, t):
        self.active.add(worker)
        return []

    def _settle(self):
        if not self.here or self.active - self.here.keys():
            return []
        here, self.here = [self.here[worker] for worker in sorted(self.here)], {}
        total = sum(one.samples for one in here)
        update = Apply(tuple(WeightedPush(one.worker, one.step, one.samples / total) for one in here))
        return [update, *(Release(one.worker) for one in here)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Full(ServePolicy):
    name: ClassVar[str] = "full-round"

    def check(self, cluster):
        return

    def rule(self, cluster):
        return _Barrier(cluster.workers)


@few
@given(st.lists(unsteady, min_size=1, max_size=5))
def test_percentage_of_one_makes_the_decisions_of_a_full_round(programmes):
    cluster, samples = _cluster(len(programmes)), _samples(len(programmes))
    told = play(POLICIES.build("percentage(1.0)"), cluster, programmes, samples=samples)
    full = play(_Full(), cluster, programmes, samples=samples)
    assert [(one.what, one.t, one.worker, one.decisions) for one in told] == [
        (one.what, one.t, one.worker, one.decisions) for one in full
    ]


@few
@given(percentages(busy))
def test_worker_takes_part_in_exactly_its_share_of_any_number_of_rounds(played):
    policy, programmes, each = played
    exact = [Fraction(share).limit_denominator(1000) for share in each]
    count = [0] * len(each)
    for told in play(policy, _cluster(len(each)), programmes):
        if told.what == "leave":
            return
        for update in decided([told], Apply):
            for part in update.parts:
                count[part.worker] += 1
        rounds = int(told.state["round"])
        if rounds >= 0:  # the first is of all, and not counted
            assert count == [1 + floor(rounds * share) for share in exact]


@few
@given(percentages(unsteady))
def test_percentage_settles_every_push_and_releases_every_worker(played):
    policy, programmes, _ = played
    story = play(policy, _cluster(len(programmes)), programmes)
    assert decided(story, Drop) == []


@few
@given(flexibles, st.lists(unsteady, min_size=1, max_size=5), transfers)
def test_flexible_settles_every_push_and_releases_every_worker(text, programmes, transfer_s):
    play(POLICIES.build(text), _cluster(len(programmes)), programmes, transfer_s=transfer_s)


@few
@given(flexibles, st.lists(busy, min_size=1, max_size=5), transfers)
def test_gradient_is_applied_in_its_own_round_or_in_a_round_it_was_invited_to(text, programmes, transfer_s):
    story = play(POLICIES.build(text), _cluster(len(programmes)), programmes, transfer_s=transfer_s)
    pushed: dict[tuple[int, int], Arrival] = {}
    invited: set[tuple[int, int]] = set()
    for told in story:
        if told.arrival is not None:
            key = told.arrival.worker, told.arrival.step
            if told.arrival.kind != "ask":
                pushed[key] = told.arrival
            elif Invite(key[0]) in told.decisions:
                invited.add(key)
        for update in decided([told], Apply):
            for part in update.parts:
                push = pushed[part.worker, part.step]
                assert (
                    push.kind == "delta" or push.read == told.version or (push.worker, push.step) in invited
                )
        for drop in decided([told], Drop):
            push = pushed[drop.worker, drop.step]
            assert push.kind == "gradient"
            assert push.read < told.version


@few
@given(flexibles, st.lists(busy, min_size=1, max_size=5))
def test_every_round_has_a_member_when_workers_are_left_out(text, programmes):
    active = set(range(len(programmes)))
    for told in play(POLICIES.build(text), _cluster(len(programmes)), programmes):
        active -= {told.worker} if told.what == "leave" else set()
        assert not active or 0 <= told.state["left_out"] < len(active)


def _weights_after(story: list[Told], policy: ServePolicy, values: dict[tuple[int, int], float]) -> float:
    """The weight of a server that starts at 0, with an optimizer that subtracts gradients."""
    flat = torch.zeros(1, dtype=torch.float64)

    def subtract() -> None:
        flat.sub_(weight.grad)

    weight = flat.view(1)
    shard = ShardState(policy, flat, [weight], subtract)
    for told in story:
        if told.arrival is not None and told.arrival.kind != "ask":
            key = told.arrival.worker, told.arrival.step
            value = torch.full((1,), values[key], dtype=torch.float64)
            shard.push(*key, Push(kind=told.arrival.kind, flat=value, used=[True]))
        for decision in told.decisions:
            if isinstance(decision, Apply):
                shard.apply(decision.parts)
            elif isinstance(decision, Drop):
                shard.drop(decision.worker, decision.step)
    assert shard.waiting == 0
    return float(flat)


@few
@given(
    st.one_of(flexibles, st.builds("percentage({})".format, shares)),
    st.lists(unsteady, min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_pushes_are_added_to_the_weights_and_never_replace_them(text, programmes, rng):
    policy = POLICIES.build(text)
    story = play(policy, _cluster(len(programmes)), programmes, samples=_samples(len(programmes)))
    arrivals = [told.arrival for told in story if told.arrival is not None and told.arrival.kind != "ask"]
    values = {(one.worker, one.step): rng.uniform(-1, 1) for one in arrivals}
    signs = {(one.worker, one.step): 1 if one.kind == "delta" else -1 for one in arrivals}
    keys = [((part.worker, part.step), part) for update in decided(story, Apply) for part in update.parts]
    expected = sum(signs[key] * part.weight * values[key] for key, part in keys)
    assert _weights_after(story, policy, values) == pytest.approx(expected, abs=1e-9)


@few
@given(st.integers(3, 8), st.integers(0, 10**6))
def test_worker_five_times_slower_is_soon_left_out_and_returns_soon_after_it_recovers(workers, seed):
    rng = random.Random(seed)

    def times(count: int, mean_s: float) -> list[float]:
        return [rng.uniform(0.95, 1.05) * mean_s for _ in range(count)]

    slow = [*times(6, 5.0), *times(30, 1.0)]
    programmes = [times(100, 1.0) for _ in range(workers - 1)] + [slow]
    story = play(POLICIES.build("flexible"), _cluster(workers), programmes)
    left = next(told.t for told in story if told.what == "leave")
    normal_from = sum(slow[:6])
    members = [
        (told.t, {part.worker for part in update.parts})
        for told in story
        for update in decided([told], Apply)
        if told.t < left
    ]
    everybody = set(range(workers))
    during = [present for t, present in members if t < normal_from - 1.0]
    assert during[4:] == [everybody - {workers - 1}] * (len(during) - 4)
    after = [present for t, present in members if t > normal_from + 5.0]
    assert after == [everybody] * len(after)
    assert len(after) > 10
