"""Simulates several policies on the same cluster: the same weights, the same data, the same luck.

For each seed all policies begin with the same weights, find the same order of the data, and each worker
draws the same delays in its steps. The result is a function of the setting and the profile, to the bit:
one thread computes, and no random numbers are drawn but from generators of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from echelon.errors import ConfigError
from echelon.observe.events import AnyEvent
from echelon.simulate.families.levels import Grouped, LevelsRunner
from echelon.simulate.families.mix import MixRunner
from echelon.simulate.families.reduce import ReduceRunner
from echelon.simulate.families.serve import ServeRunner
from echelon.simulate.families.share import ShareRunner
from echelon.simulate.learner import Idle, Learner, Problem
from echelon.simulate.order import Order
from echelon.simulate.outcome import Run, SimulationResult
from echelon.simulate.profile import Profile, measure
from echelon.simulate.scene import Listener, Scene, Stage
from echelon.simulate.setting import Setting
from echelon.sync.families.mix import MixPolicy
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policies.levels import Levels
from echelon.sync.policy import POLICIES, Policy


class Runner(Protocol):
    """How policies of one family are run."""

    def start(self) -> None:
        """Ask the clock for the first actions."""

    def shown(self) -> Sequence[Tensor]:
        """The weights to be evaluated; several for the mean of their figures."""


def simulate(
    setting: Setting,
    policies: Sequence[str],
    *,
    listen: Callable[[str, int, AnyEvent], None] | None = None,
) -> SimulationResult:
    """Run each policy with each seed; `listen`, if given, hears every event, with its policy and seed."""
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
    """One policy with one seed."""
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # what modules draw as they compute, such as dropout
        learner = Learner(problem, seed) if setting.gradients else Idle(problem, seed)
        scene = Scene(setting, profile, learner, Order(problem.samples, seed), seed, listener)
        runner = runner_of(policy, scene)
        runner.start()
        scene.play(runner.shown)
    return Run(policy=text or policy.name, seed=seed, curve=tuple(scene.curve), totals=scene.totals())


def runner_of(policy: Policy, scene: Scene) -> Runner:
    """How this policy is run."""
    stage: Stage = scene
    if isinstance(policy, Levels):
        inside, between = policy.inside, policy.between
        if isinstance(inside, MixPolicy) and isinstance(between, MixPolicy):
            return LevelsRunner(inside, between, scene)
        policy, stage = between, Grouped(scene)
    if isinstance(policy, ServePolicy):
        return ServeRunner(policy, stage)
    if isinstance(policy, MixPolicy):
        return MixRunner(policy, stage)
    if policy.family == "reduce":
        return ReduceRunner(scene)
    if policy.family == "share":
        return ShareRunner(scene)
    raise ConfigError(
        f"the virtual clock cannot run {policy.name}: it knows no policies of that kind",
        where="--sync",
        fix="choose another policy, or run this one on a cluster",
    )


def _asked(setting: Setting, policies: Sequence[str]) -> dict[str, Policy]:
    """All policies, checked before any is run."""
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
    """More threads would add in another order from run to run, and gain little on small batches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
