"""A small virtual cluster, and the same training in plain torch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.observe.events import AnyEvent
from echelon.simulate.learner import Learner, Problem
from echelon.simulate.order import Order
from echelon.simulate.profile import Costs, Profile, VirtualLink
from echelon.simulate.run import Runner, runner_of
from echelon.simulate.setting import Setting
from echelon.simulate.virtual import VirtualCluster
from echelon.sync.policy import POLICIES, Policy

NO_LINK = VirtualLink(latency_s=0.0, bytes_per_s=1e30)
SETTING = Setting(
    workers=4,
    model="mlp(8, 1)",
    data="digits",
    batch=4,
    lr=0.05,
    seconds=0.5,
    test_samples=50,
    train_samples=50,
    evaluate_every_s=0.25,
    profile=Profile(
        compute_s=0.01,
        costs=Costs(queue_s=0.0005, apply_s=0.001, hand_s=0.001),
        link=VirtualLink(latency_s=1e-4, bytes_per_s=1e8),
    ),
)


@pytest.fixture(scope="session")
def setting() -> Setting:
    return SETTING


@pytest.fixture(scope="session")
def problem() -> Problem:
    return Problem(SETTING)


class Played:
    """A finished run."""

    def __init__(
        self, virtual: VirtualCluster, runner: Runner, events: list[AnyEvent], begun: list[list[Tensor]]
    ):
        self.counts = virtual.counts
        self.totals = virtual.totals()
        self.curve = virtual.curve
        self.weights = [flat.detach().clone() for flat in runner.shown()]
        self.events = events
        self.begun = begun  # by rank: the samples of each of its steps

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def play(problem: Problem) -> Callable[..., Played]:
    """Runs a policy, given as text or as an object, and records it."""

    def played(setting: Setting, policy: str | Policy, seed: int = 0) -> Played:
        chosen = POLICIES.build(policy).resolved() if isinstance(policy, str) else policy
        assert setting.profile is not None
        events: list[AnyEvent] = []
        learner = Learner(problem, seed)
        virtual = VirtualCluster(
            setting, setting.profile, learner, Order(problem.samples, seed), seed, events.append
        )
        begun: list[list[Tensor]] = [[] for _ in range(setting.workers)]
        begin = virtual.begin

        def noted(rank: int) -> tuple[Tensor, float]:
            indices, compute_s = begin(rank)
            begun[rank].append(indices)
            return indices, compute_s

        virtual.begin = noted  # type: ignore[method-assign]
        runner = runner_of(chosen, virtual)
        runner.start()
        virtual.run(runner.shown)
        return Played(virtual, runner, events, begun)

    return played


@pytest.fixture
def free() -> Profile:
    """One second for a gradient; everything else takes no time."""
    return Profile(compute_s=1.0, costs=Costs(), link=NO_LINK)


@pytest.fixture
def plainly(problem: Problem) -> Callable[..., Tensor]:
    """Trains one module in plain torch, with the global batch."""

    def trained(setting: Setting, batch: int, steps: int, seed: int = 0) -> Tensor:
        module = problem.build(seed)
        optimizer = torch.optim.SGD(module.parameters(), lr=setting.lr, momentum=setting.momentum)
        order = Order(problem.samples, seed)
        for _ in range(steps):
            x, y = problem.batch(order.take(batch))
            optimizer.zero_grad()
            problem.loss(module(x), y).backward()
            optimizer.step()
        return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])

    return trained


@pytest.fixture
def with_profile() -> Callable[..., Setting]:
    def changed(profile: Profile, **fields: Any) -> Setting:
        fields.setdefault("evaluate_every_s", fields["seconds"])
        return replace(SETTING, profile=profile, **fields)

    return changed
