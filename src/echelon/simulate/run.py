"""Simulates several policies on the same virtual cluster, with the same weights, data and delays.

For each seed all policies start with the same weights and get the same order of samples, and each worker
draws the same delays, and the same jitter and loss for its transfers. The result is a function of the
setting and the profile, to the bit: one thread computes, and all random numbers come from generators of the
run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from echelon.errors import ConfigError
from echelon.observe.events import AnyEvent
from echelon.simulate.families.levels import LevelsRunner, VirtualGroups
from echelon.simulate.families.mix import MixRunner
from echelon.simulate.families.reduce import ReduceRunner
from echelon.simulate.families.serve import ServeRunner
from echelon.simulate.families.share import ShareRunner
from echelon.simulate.learner import Learner, Problem, TimingOnly
from echelon.simulate.order import Order
from echelon.simulate.outcome import Run, SimulationResult
from echelon.simulate.profile import Profile, measure
from echelon.simulate.setting import Setting
from echelon.simulate.virtual import Listener, VirtualCluster, VirtualWorkers
from echelon.sync.families.mix import MixPolicy
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policies.levels import Levels
from echelon.sync.policy import POLICIES, Policy


class Runner(Protocol):
    """Runs the policies of one family."""

    def start(self) -> None:
        """Schedule the first actions."""

    def shown(self) -> Sequence[Tensor]:
        """The weights to evaluate; the figures of several are averaged."""


def simulate(
    setting: Setting,
    policies: Sequence[str],
    *,
    listen: Callable[[str, int, AnyEvent], None] | None = None,
) -> SimulationResult:
    """Run each policy with each seed; `listen`, if given, gets every event with its policy and seed."""
    asked = _asked(setting, policies)
    with _one_thread():
        problem = Problem(setting)
        profile = setting.profile or measure(setting, problem)
        runs = []
        for text, policy in asked.items():
            for seed in range(setting.seed, setting.seed + setting.seeds):
                tell = _listener(listen, text, seed)
                runs.append(run_policy(setting, policy, problem, profile, seed, text=text, listener=tell))
    return SimulationResult(setting=setting, profile=profile, runs=tuple(runs))


def run_policy(
    setting: Setting,
    policy: Policy,
    problem: Problem,
    profile: Profile,
    seed: int,
    *,
    text: str = "",
    listener: Listener | None = None,
) -> Run:
    """Run one policy with one seed."""
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for random numbers of modules, such as dropout
        learner = Learner(problem, seed) if setting.gradients else TimingOnly(problem, seed)
        virtual = VirtualCluster(setting, profile, learner, Order(problem.samples, seed), seed, listener)
        runner = runner_of(policy, virtual)
        runner.start()
        virtual.run(runner.shown)
    return Run(policy=text or policy.name, seed=seed, curve=tuple(virtual.curve), totals=virtual.totals())


def runner_of(policy: Policy, virtual: VirtualCluster) -> Runner:
    """The runner of this policy's family."""
    workers: VirtualWorkers = virtual
    if isinstance(policy, Levels):
        inside, between = policy.inside, policy.between
        if isinstance(inside, MixPolicy) and isinstance(between, MixPolicy):
            return LevelsRunner(inside, between, virtual)
        policy, workers = between, VirtualGroups(virtual)
    if isinstance(policy, ServePolicy):
        return ServeRunner(policy, workers)
    if isinstance(policy, MixPolicy):
        return MixRunner(policy, workers)
    if policy.family == "reduce":
        return ReduceRunner(virtual)
    if policy.family == "share":
        return ShareRunner(virtual)
    raise ConfigError(
        f"{policy.name} cannot be simulated: the simulator has no runner for it",
        where="--sync",
        fix="choose another policy, or train with this one",
    )


def _asked(setting: Setting, policies: Sequence[str]) -> dict[str, Policy]:
    """All policies, checked before any of them runs."""
    if not policies:
        raise ConfigError("no policy to simulate", where="--sync", fix="give one: --sync full")
    found: dict[str, Policy] = {}
    for text in policies:
        if text in found:
            raise ConfigError(f"{text} is given twice", where="--sync", fix="give it once")
        policy = POLICIES.build(text, where="--sync").resolved()
        policy.check(setting.cluster)
        found[text] = policy
    return found


def _listener(listen: Callable[[str, int, AnyEvent], None] | None, text: str, seed: int) -> Listener | None:
    if listen is None:
        return None
    return lambda event: listen(text, seed, event)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: several would sum in varying order and gain little on small batches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
