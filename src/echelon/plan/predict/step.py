"""How do steps go, one after the other? Computing, buckets, links, optimizer; all workers at once.

In backward a bucket is ready when all workers have computed its gradients. Then it takes, after the
latency of the collective's steps, as long as the slowest of three: the links that it passes, which
earlier buckets may still use; the CPU time of the threads that move it; and its own chain of transfers.
With overlap="backward" all wait for the last bucket; with overlap="step" the next forward pass waits for
each bucket where it uses its parameters, and later buckets overtake earlier ones, because they are used
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from echelon.config.choices import Overlap
from echelon.plan.predict.buckets import BucketLoad
from echelon.plan.predict.engine_costs import EngineCosts
from echelon.plan.predict.flows import Floats
from echelon.plan.predict.network import SharedLinks
from echelon.plan.predict.workers import WorkerClocks, WorkerCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """One step: when it ended for all, and where its time went."""

    ended: float
    wait_s: Floats
    exposed_s: float
    apply_s: float


class StepSimulation:
    """Steps of one strategy, one after the other."""

    def __init__(
        self,
        buckets: Sequence[BucketLoad],
        costs: WorkerCosts,
        network: SharedLinks,
        engine: EngineCosts,
        *,
        overlap: Overlap,
        exchanges: int = 0,
        moved_part: Floats | None = None,
    ) -> None:
        self._buckets = list(buckets)
        self._costs = costs
        self.quotas = costs.quotas
        self._network = network
        self._engine = engine
        self._overlap: Overlap = overlap if network.size > 1 else "backward"
        self._exchanges = exchanges if network.size > 1 else 0
        self._clocks = WorkerClocks(costs)
        self._moved_part = np.ones(network.size) if moved_part is None else moved_part
        self._links_free = np.zeros(len(network.rates))
        self._moving_free = np.zeros(network.size)
        self._main_s = [self._main_work(bucket) for bucket in self._buckets]
        self._moving_s = [self.moving_s(bucket) for bucket in self._buckets]
        self._land_s = [costs.engine * bucket.land_s for bucket in self._buckets]
        self._arrivals = [0.0] * len(self._buckets)  # of the step before, by bucket
        self._begun = 0.0  # when the first bucket of this step was sent
        self._first = min((bucket.ready_at for bucket in self._buckets), default=1.0)

    def _main_work(self, bucket: BucketLoad) -> Floats:
        engine = self._engine
        hooks_s = engine.bucket_s + engine.parameter_s * bucket.parameters
        work_s: Floats = self._costs.engine * (bucket.main_s + hooks_s)
        return work_s

    def moving_s(self, bucket: BucketLoad) -> Floats:
        """CPU seconds of the threads that move a bucket."""
        cost, costs = bucket.cost, self._costs
        messages_s = self._engine.message_s * cost.messages * bucket.lanes
        moved_s = cost.moved_s * bucket.sent_bytes * self._moved_part
        added_s = costs.add_s * cost.added_fractions * bucket.sent_bytes
        work_s: Floats = costs.engine * (messages_s + moved_s) + added_s
        return work_s

    @property
    def budgets_s(self) -> Floats:
        """How long each worker's CPU budget has taken to be granted, so far."""
        granted_s: Floats = self._clocks.spent_s / self._costs.quotas
        return granted_s

    def step(self, noise: Floats | float = 1.0) -> StepTimes:
        """Simulate one step; `noise` is a factor of each worker's computing."""
        clocks, costs = self._clocks, self._costs
        compute_s = costs.compute_s * noise
        clocks.waited_s = 0.0 * clocks.waited_s
        done = self._forward(compute_s) if self._overlap == "step" else 0.0
        ready: list[float] = []
        for bucket, main_s in zip(self._buckets, self._main_s, strict=True):
            self._compute(compute_s, done, bucket.ready_at, main_s)
            done = max(done, bucket.ready_at)
            ready.append(float(clocks.now.max()))
            self._move(len(ready) - 1, ready[-1])
        self._compute(compute_s, done, 1.0, 0.0 * compute_s)
        backward_end = clocks.now.copy()
        if self._overlap == "step":
            self._overtake(ready)
            clocks.work(costs.engine * self._engine.step_s)
            ended = float(clocks.now.max())
            return StepTimes(
                ended=ended,
                wait_s=clocks.waited_s,
                exposed_s=float(clocks.waited_s.min()),
                apply_s=float(costs.apply_s.max()),
            )
        arrived = max(self._arrivals, default=0.0)
        clocks.wait(arrived)
        applying = clocks.now.copy()
        after_s = costs.apply_s + sum(self._land_s, 0.0 * costs.apply_s)
        clocks.work(after_s + costs.engine * self._engine.step_s * (self._network.size > 1))
        return StepTimes(
            ended=float(clocks.now.max()),
            wait_s=clocks.waited_s,
            exposed_s=max(0.0, arrived - float(backward_end.max())),
            apply_s=float((clocks.now - applying).max()),
        )

    def _compute(self, compute_s: Floats, start: float, stop: float, main_s: Floats) -> None:
        """A part of the pass, with the exchanges in it, then the work of a bucket."""
        begin, end = (int(at * self._exchanges + 1e-9) for at in (start, stop))
        count = end - begin
        part_s = max(0.0, stop - start) * compute_s / (count + 1)
        for _ in range(count):
            self._clocks.work(part_s)
            self._exchange()
        self._clocks.work(part_s + main_s)

    def _exchange(self) -> None:
        """All workers meet: a small message from everyone to everyone."""
        engine, clocks = self._engine, self._clocks
        clocks.wait(float(clocks.now.max()) + engine.latency_s)
        others = self._network.size - 1
        clocks.work(self._costs.engine * (engine.exchange_s + 2 * others * engine.message_s))

    def _move(self, index: int, ready: float) -> None:
        """Start a bucket at that time."""
        bucket, cost = self._buckets[index], self._buckets[index].cost
        moving_s = self._moving_s[index]
        self._begun = ready if index == 0 else self._begun
        moved = self._clocks.charge(moving_s, ready, last=index + 1 == len(self._buckets))
        self._moving_free = np.maximum(np.maximum(self._moving_free, ready) + moving_s, moved)
        stalls_s = self._stalls_s(index)
        wire_s = cost.link_s_per_byte * bucket.sent_bytes
        used = wire_s > 0
        self._links_free = np.where(
            used, np.maximum(self._links_free, ready + stalls_s) + wire_s, self._links_free
        )
        linked = float(self._links_free[used].max(initial=ready)) - self._engine.burst_s
        chained = ready + stalls_s + cost.s_per_byte * bucket.sent_bytes - self._engine.burst_s
        waits_s = (cost.steps * self._engine.latency_s + cost.latency_s) / bucket.lanes
        busy = float(self._moving_free.max()) if self._network.size > 1 else ready
        self._arrivals[index] = max(ready, linked, chained, busy) + waits_s
        if index + 1 == len(self._buckets):
            self._arrivals[index] += self._drained_s(self._arrivals[index] - self._begun)

    def _stalls_s(self, index: int) -> float:
        """How long a bucket's steps wait for workers whose quota is used up by computing.

        While they compute, every step of the collective may wait; the last bucket is sent when all have
        computed, so only its first step does.
        """
        steps = 1 if index + 1 == len(self._buckets) else self._buckets[index].cost.steps
        return steps * float(self._costs.stall_s.max())

    def _drained_s(self, elapsed_s: float) -> float:
        """How long transfers that take so long wait for workers whose quota is used up by moving bytes.

        The more of the budget moving takes, the more likely it runs out; it lasts for moving / budget
        periods, and then half of the rest of a period is lost.
        """
        quotas, period_s = self._costs.quotas, self._engine.period_s
        moving_s = sum(self._moving_s, 0.0 * quotas)
        used = np.minimum(1.0, moving_s / (quotas * max(elapsed_s, 1e-12)))
        lost_s: Floats = used * moving_s / (quotas * period_s) * (1 - quotas) * period_s / 2
        return float(lost_s.max(initial=0.0))

    # With overlap="step" ---------------------------------------------------------------------------

    def _forward(self, compute_s: Floats) -> float:
        """The forward pass waits for each bucket of the step before; returns the part that is done."""
        clocks, costs = self._clocks, self._costs
        total = sum(bucket.size_bytes for bucket in self._buckets) or 1
        done = 0.0
        for index in reversed(range(len(self._buckets))):
            bucket = self._buckets[index]
            used_at = self._first / 2 * (1 - bucket.ready_at) / max(1 - self._first, 1e-9)
            self._compute(compute_s, done, max(done, used_at), 0.0 * compute_s)
            done = max(done, used_at)
            clocks.wait(self._arrivals[index])
            settle_s = costs.engine * self._engine.settle_s + self._land_s[index]
            clocks.work(costs.apply_s * bucket.size_bytes / total + settle_s)
        return done

    def _overtake(self, ready: Sequence[float]) -> None:
        """Among buckets that wait for links at the end, the last arrives first."""
        if not ready:
            return
        last = max(self._arrivals)
        backlog_s = last - ready[-1]
        at = ready[-1]
        for index in reversed(range(len(ready))):
            bucket = self._buckets[index]
            own_s = min(bucket.cost.s_per_byte * bucket.sent_bytes, backlog_s)
            if index:
                at += own_s
                backlog_s -= own_s
                self._arrivals[index] = min(self._arrivals[index], at)
            else:
                self._arrivals[index] = last if backlog_s > 0 else min(self._arrivals[index], at)
