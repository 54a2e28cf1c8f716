"""The virtual cluster of a run: workers with speeds, delays and links, the order of data, counts and a
curve.

In each step a worker takes the next batch and computes for compute_s / speed plus a delay drawn from its
own generator; then the runner of the policy's family takes over. Delayed workers are chosen as in real
training.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from echelon.cluster.delay import DELAYS, Delay
from echelon.errors import ConfigError
from echelon.observe.events import AnyEvent, Evaluated
from echelon.plan.plan import PlanRequest, make_plan
from echelon.simulate.clock import Clock
from echelon.simulate.late import LateTransfers
from echelon.simulate.learner import Learner, Quality
from echelon.simulate.order import Order
from echelon.simulate.outcome import Point, Totals
from echelon.simulate.profile import Profile
from echelon.simulate.setting import Setting
from echelon.sync.policy import ClusterInfo

Listener = Callable[[AnyEvent], None]


class VirtualWorkers(Protocol):
    """What the runners need. Each rank is a worker, or a group that acts as one."""

    setting: Setting
    profile: Profile
    learner: Learner
    clock: Clock
    counts: Counts
    cluster: ClusterInfo
    listener: Listener | None

    def begin(self, rank: int) -> tuple[Tensor, float]:
        """A worker begins a step: its samples, and the seconds until it has their gradient."""

    def gradient(self, weights: Tensor, indices: Tensor) -> Tensor:
        """The gradient of these samples; it is counted."""

    def size_of(self, rank: int) -> int:
        """The number of workers that act as this one."""

    def spread_s(self, rank: int) -> float:
        """Seconds until all of them have the weights that one of them received."""

    def transfer_s(self, rank: int) -> float:
        """Seconds for one model to the server or back, this time."""

    def message_s(self, rank: int) -> float:
        """Seconds for the smallest message to the server or back, this time."""

    def late_s(self, rank: int) -> float:
        """How much later than rate and latency say the next transfer arrives."""

    def bytes_per_s(self, rank: int) -> float:
        """The rate of the link to others."""

    @property
    def latency_s(self) -> float:
        """Seconds for the smallest message that is not late."""

    @property
    def has_late_links(self) -> bool:
        """Whether transfers may be late: whether there is jitter or loss."""


class VirtualCluster:
    """The workers of one run."""

    def __init__(
        self,
        setting: Setting,
        profile: Profile,
        learner: Learner,
        order: Order,
        seed: int,
        listener: Listener | None = None,
    ) -> None:
        self.setting = setting
        self.profile = profile
        self.learner = learner
        self.cluster = cluster_of(setting, seed)
        self.clock = Clock()
        self.listener = listener
        self.counts = Counts()
        self.curve: list[Point] = []
        self._order = order
        self._compute_s, self._delays = _paces(setting, profile)
        self._late = LateTransfers(setting, seed)
        self._draws = [random.Random(f"{seed}/{rank}") for rank in range(setting.workers)]

    def begin(self, rank: int) -> tuple[Tensor, float]:
        """A worker begins a step: its samples, and how long it computes."""
        delay = self._delays[rank]
        compute_s = self._compute_s[rank] + (delay.sample(self._draws[rank]) if delay else 0.0)
        self.counts.busy_s += min(compute_s, self.setting.seconds - self.clock.now)
        return self._order.take(self.setting.batch), compute_s

    def gradient(self, weights: Tensor, indices: Tensor) -> Tensor:
        """A gradient; it is counted."""
        self.counts.gradients += 1
        return self.learner.gradient_at(weights, indices)[0]

    def size_of(self, rank: int) -> int:
        """Always one."""
        return 1

    def spread_s(self, rank: int) -> float:
        """Zero: there are no other members."""
        return 0.0

    def transfer_s(self, rank: int) -> float:
        """Seconds for one model between a worker and the server."""
        return self.message_s(rank) + self.learner.size_bytes / self.bytes_per_s(rank)

    def message_s(self, rank: int) -> float:
        """Seconds for the smallest message between a worker and the server."""
        return self.latency_s + self.late_s(rank)

    def late_s(self, rank: int) -> float:
        """How much later the worker's next transfer arrives, by jitter and loss."""
        return self._late.next_s(rank)

    def bytes_per_s(self, rank: int) -> float:
        """The rate of the worker's link."""
        return self.setting.links[rank] if self.setting.links else self.profile.link.bytes_per_s

    @property
    def latency_s(self) -> float:
        """Seconds for the smallest message that is not late."""
        return self.profile.link.latency_s

    @property
    def has_late_links(self) -> bool:
        """Whether there is jitter or loss."""
        return self._late.happen

    def run(self, shown: Callable[[], Sequence[Tensor]]) -> None:
        """Run until the end. `shown` gives the weights to evaluate; the figures of several are averaged."""
        *during, end = self.setting.evaluations
        for t in during:
            self.clock.at(t, lambda: self._evaluate(shown()), background=True)
        if not self.clock.run(end):
            raise ConfigError(
                f"after {self.clock.now:g} s all workers wait and none will be released",
                where="simulation",
                fix="repair the policy: it must answer every arrival, and members must agree on averages",
            )
        self._evaluate(shown())

    def _evaluate(self, weights: Sequence[Tensor]) -> None:
        found = [self.learner.evaluate(flat) for flat in weights]
        point = Point(
            t=self.clock.now,
            gradients=self.counts.gradients,
            updates=self.counts.updates,
            train_loss=_mean([figures.train_loss for figures in found]),
            test_loss=_mean([figures.test_loss for figures in found]),
            test_accuracy=_mean([figures.test_accuracy for figures in found]),
        )
        self.curve.append(point)
        if self.listener is not None and point.test_loss is not None:
            self.listener(self._evaluated(point, found[0]))

    def _evaluated(self, point: Point, figures: Quality) -> Evaluated:
        return Evaluated(
            t=point.t,
            rank=0,
            epoch=self._order.passes,
            step=point.updates,
            loss=point.test_loss or 0.0,
            accuracy=point.test_accuracy,
            samples=figures.samples,
        )

    def totals(self) -> Totals:
        """The counts at the end of the run."""
        counts = self.counts
        return Totals(
            gradients=counts.gradients,
            applied=counts.applied,
            dropped=counts.dropped,
            updates=counts.updates,
            samples=counts.applied * self.setting.batch,
            staleness_mean=counts.stale / counts.pushes if counts.pushes else 0.0,
            staleness_max=counts.stale_most,
            waiting_share=max(0.0, 1 - counts.busy_s / (self.setting.workers * self.setting.seconds)),
        )


def cluster_of(setting: Setting, seed: int) -> ClusterInfo:
    """What a policy knows in the run with that seed."""
    return dataclasses.replace(setting.cluster, seed=seed)


class Counts:
    """The counts of a run so far."""

    def __init__(self) -> None:
        self.gradients = self.applied = self.dropped = self.updates = 0
        self.pushes = self.stale = self.stale_most = 0
        self.busy_s = 0.0

    def used(self, gradients: int, staleness: int) -> None:
        """Count an applied push of so many gradients, `staleness` updates after its weights were read."""
        self.applied += gradients
        self.pushes += 1
        self.stale += staleness
        self.stale_most = max(self.stale_most, staleness)


def _paces(setting: Setting, profile: Profile) -> tuple[list[float], list[Delay | None]]:
    asked = PlanRequest(speeds=setting.speeds, delay=setting.delay, delayed=setting.delayed)
    plan = make_plan("simulated", ["virtual"] * setting.workers, asked, cores=1)
    delay = DELAYS.build(setting.delay, where="--delay") if setting.delay else None
    return (
        [profile.compute_s / worker.speed for worker in plan.workers],
        [delay if worker.delay else None for worker in plan.workers],
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def mean_of(weights: Sequence[Tensor], shares: Sequence[float] = ()) -> Tensor:
    """The mean of flat tensors, weighted by shares if these differ, summed in order."""
    total = weights[0].clone()
    with torch.no_grad():
        if len(set(shares)) > 1:
            total.zero_()
            for flat, share in zip(weights, shares, strict=True):
                total.add_(flat, alpha=share / sum(shares))
            return total
        for flat in weights[1:]:
            total.add_(flat)
        return total.div_(len(weights))
