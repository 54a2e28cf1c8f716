"""Averages between virtual workers, and hogwild."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from echelon.errors import ConfigError
from echelon.simulate.learner import Learner
from echelon.simulate.profile import VirtualLink
from echelon.sync.families.mix import Average, MixPolicy, Neighbours

RING = {0: {0: 0.5, 1: 0.25, 3: 0.25}, 1: {1: 0.5, 0: 0.25, 2: 0.25}, 2: {2: 0.5, 1: 0.25, 3: 0.25}}
RING[3] = {3: 0.5, 2: 0.25, 0: 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(MixPolicy):
    """Averages by a given schedule and shows each worker's own weights."""

    name: ClassVar[str] = "scheduled"
    shown: ClassVar[str] = "own"
    meets: object

    def check(self, cluster):
        return None

    def averaging(self, step, rank, cluster):
        return self.meets(step, rank)


def test_neighbours_average_weights_of_the_same_step_at_any_speed(with_profile, free, play, problem):
    setting = with_profile(free, workers=4, seconds=13.01, speeds=(1.0, 0.5, 0.8, 1.0))
    policy = Scheduled(meets=lambda step, rank: Neighbours(RING[rank]) if step % 2 == 0 else None)
    played = play(setting, policy)
    learner = Learner(problem, 0)
    own = [learner.initial() for _ in range(4)]
    expected = [[] for _ in range(4)]  # what each has at any time
    for step in range(min(len(begun) for begun in played.begun)):
        gradients = [learner.gradient_at(own[rank], played.begun[rank][step])[0] for rank in range(4)]
        own = [flat - setting.lr * gradient for flat, gradient in zip(own, gradients, strict=True)]
        for rank in range(4):
            expected[rank].append(own[rank])
        if step % 2 == 0:
            own = [sum(weight * own[other] for other, weight in RING[rank].items()) for rank in range(4)]
            for rank in range(4):
                expected[rank].append(own[rank])
    assert len({len(begun) for begun in played.begun}) > 1, "one worker should have got ahead"
    slowest = played.begun.index(min(played.begun, key=len))
    assert any(torch.allclose(played.weights[slowest], one, atol=1e-6) for one in expected[slowest][-3:])


def test_members_of_an_average_wait_for_the_slowest_and_for_the_ring(with_profile, free, problem, play):
    size_bytes = Learner(problem, 0).size_bytes
    link = VirtualLink(latency_s=0.1, bytes_per_s=size_bytes)  # 2 x 0.1 s and 2 x 1/2 x 1 s for two members
    profile = replace(free, link=link)
    policy = Scheduled(meets=lambda step, rank: Average((0, 1)) if step % 2 else None)
    setting = with_profile(profile, workers=2, speeds=(1.0, 0.5), seconds=5.25, evaluate_every_s=5.15)
    played = play(setting, policy)
    assert [point.updates for point in played.curve] == [0, 0, 1]  # at 4 + 1.2 s
    assert torch.equal(played.weights[0], played.weights[1])


def test_a_round_of_all_lasts_as_long_as_the_slowest_and_the_ring(with_profile, free, problem, play):
    link = VirtualLink(latency_s=0.1, bytes_per_s=Learner(problem, 0).size_bytes)
    setting = with_profile(replace(free, link=link), workers=2, speeds=(1.0, 0.5), seconds=6.5)
    played = play(replace(setting, evaluate_every_s=6.3), "full")
    assert [point.updates for point in played.curve] == [0, 1, 2]  # at 3.2 and 6.4 s


def test_groups_average_without_waiting_for_others(with_profile, free, play):
    policy = Scheduled(meets=lambda step, rank: Average((0, 1) if rank < 2 else (2, 3)))
    setting = with_profile(free, workers=4, speeds=(1.0, 1.0, 0.5, 0.5), seconds=8.5)
    played = play(setting, policy)
    assert played.totals.updates == 8 + 4
    assert torch.equal(played.weights[0], played.weights[1])
    assert torch.equal(played.weights[2], played.weights[3])
    assert not torch.equal(played.weights[0], played.weights[2])


def test_disagreement_of_workers_about_an_average_is_an_error(with_profile, free, play):
    policy = Scheduled(meets=lambda step, rank: Average((0, 1) if rank else (1, 0)))
    with pytest.raises(ConfigError, match="all workers wait"):
        play(with_profile(free, workers=2, seconds=9), policy)


def test_without_synchronisation_workers_train_independently(with_profile, free, play):
    played = play(with_profile(free, workers=2, seconds=4.5), "none")
    assert played.totals.updates == 0
    assert played.totals.applied == 8
    assert not torch.equal(*played.weights)


def test_hogwild_applies_gradients_computed_on_older_weights(with_profile, free, play, problem):
    setting = with_profile(free, workers=2, speeds=(1.0, 0.4), momentum=0.5, seconds=2.7)
    played = play(setting, "hogwild")
    learner = Learner(problem, 0)
    flat = learner.initial()
    slow, _ = learner.gradient_at(flat, played.begun[1][0])
    velocity = torch.zeros_like(flat)
    for indices in played.begun[0][:2]:
        velocity = 0.5 * velocity + learner.gradient_at(flat, indices)[0]
        flat = flat - setting.lr * velocity
    flat = flat - setting.lr * slow  # by an optimizer of its own, whose momentum is new
    assert torch.allclose(played.weights[0], flat, atol=1e-6)
    assert played.totals.staleness_max == 2
    assert played.totals.staleness_mean == pytest.approx(2 / 3)
