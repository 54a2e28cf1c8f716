"""What would a step of a strategy take? Predicted from the topology and the job, and never fitted on runs.

`predict` simulates a few steps until they repeat. `simulate_steps` draws a log-normal factor for the
computing of every worker and step. Both are quick: a millisecond or so for a dozen nodes, as all workers
are computed at once, bucket by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echelon.errors import ConfigError
from echelon.plan.job import JobProfile
from echelon.plan.predict.buckets import BucketLoad, buckets_of
from echelon.plan.predict.engine_costs import EngineCosts
from echelon.plan.predict.flows import Floats, served_phases
from echelon.plan.predict.network import CollectiveCost, SharedLinks
from echelon.plan.predict.policies import (
    PolicyCost,
    between_phases,
    inside_phases,
    policy_of,
    serving_cycle_s,
)
from echelon.plan.predict.step import StepSimulation
from echelon.plan.predict.workers import WorkerCosts
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Topology

_STEPS = 7
_FIRST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What both kinds of prediction begin with."""

    network: SharedLinks
    costs: WorkerCosts
    buckets: list[BucketLoad]
    policy: PolicyCost
    extra: list[tuple[BucketLoad, int]]  # after the optimizer, every so many steps

    def bytes_by_link(self) -> Floats:
        """In a step, on average."""
        total = np.zeros(len(self.network.rates))
        if self.network.size > 1:
            for bucket in self.buckets:
                total += bucket.cost.link_fractions * bucket.sent_bytes
            for bucket, period in self.extra:
                total += bucket.cost.link_fractions * bucket.sent_bytes / period
        return total

    def seconds_by_link(self) -> Floats:
        total = self.bytes_by_link()
        return np.where(total > 0, total / self.network.rates, 0.0)


def predict(
    topology: Topology, job: JobProfile, strategy: RunStrategy, engine: EngineCosts | None = None
) -> Prediction:
    """What a step of this strategy would take."""
    engine = engine or EngineCosts()
    parts = _parts(topology, job, strategy, engine)
    if parts.policy.kind == "serve":
        return _served(parts, job, strategy, engine)
    simulation = _simulation(parts, job, strategy, engine)
    times = [simulation.step() for _ in range(_STEPS)]
    if (simulation.quotas < 1).any():
        # How long quotas stop a worker depends on the time of a step, and the work on it.
        stopped = np.minimum(1.0, simulation.budgets_s / times[-1].ended) * (1 - simulation.quotas)
        moved_part = 1 - (1 - engine.unwoken) * stopped
        simulation = _simulation(parts, job, strategy, engine, moved_part)
        times = [simulation.step() for _ in range(_STEPS)]
    # Budgets are full at the beginning. Either a wait fills them in every step, and all steps are alike, or
    # all of the budget is used, and a step takes what the budget takes. With overlap="step" the first steps
    # have nothing to wait for.
    skipped = _FIRST_STEPS if strategy.overlap == "step" else 0
    counted = times[skipped:]
    begun = times[skipped - 1].ended if skipped else 0.0
    step_s = (times[-1].ended - begun) / len(counted)
    budgets_s = float(simulation.budgets_s.max()) / len(times)
    extra_s = sum(_alone_s(simulation, bucket, engine) / period for bucket, period in parts.extra)
    step_s = max(_no_less(step_s, parts), budgets_s) + extra_s
    waits = np.mean([one.wait_s for one in counted], axis=0)
    exposed_s = float(np.mean([one.exposed_s for one in counted])) + extra_s
    apply_s = float(np.mean([one.apply_s for one in counted]))
    return _prediction(
        parts, job, strategy, step_s=step_s, waits=waits, exposed_s=exposed_s, apply_s=apply_s
    )


def simulate_steps(
    topology: Topology,
    job: JobProfile,
    strategy: RunStrategy,
    steps: int,
    noise: float,
    seed: int = 0,
    engine: EngineCosts | None = None,
) -> Floats:
    """The seconds of each of many steps; `noise` is the standard deviation of the logarithm of computing.

    Factors have the mean 1. Of policies with servers, only the mean is known.
    """
    engine = engine or EngineCosts()
    parts = _parts(topology, job, strategy, engine)
    draw = np.random.default_rng(seed)
    if parts.policy.kind == "serve":
        return np.full(steps, _served(parts, job, strategy, engine).step_s)
    simulation = _simulation(parts, job, strategy, engine)
    ended = [simulation.step().ended for _ in range(_FIRST_STEPS)][-1:]
    for _ in range(steps):
        factors = draw.lognormal(-noise * noise / 2, noise, len(strategy.nodes))
        ended.append(simulation.step(factors).ended)
    extra_s = sum(_alone_s(simulation, bucket, engine) / period for bucket, period in parts.extra)
    seconds: Floats = np.diff(np.array(ended))
    return seconds + extra_s


def _parts(topology: Topology, job: JobProfile, strategy: RunStrategy, engine: EngineCosts) -> _Parts:
    _check(topology, strategy)
    order = [rank for group in strategy.groups for rank in group]
    servers = min(strategy.servers, len(strategy.nodes))
    network = SharedLinks(topology, strategy.nodes, engine, servers=servers, order=order)
    costs = WorkerCosts(job, strategy, network, engine)
    policy = policy_of(strategy.sync)
    replaced: CollectiveCost | None = None
    buckets: list[BucketLoad] = []
    extra: list[tuple[BucketLoad, int]] = []
    if network.size > 1 and policy.kind in ("reduce", "levels"):
        if policy.kind == "levels" and strategy.groups:
            replaced = network.of(inside_phases(strategy))
            extra.append((_whole(job, network, network.of(between_phases(strategy))), policy.period))
        elif servers:
            replaced = network.of(served_phases(network.size, servers))
        buckets = buckets_of(job, strategy, network, engine, replaced)
    elif network.size > 1 and policy.kind == "average":
        whole = _whole(job, network, network.cost(strategy.collective, job.gradient_bytes))
        extra.append((whole, policy.period))
    return _Parts(network=network, costs=costs, buckets=buckets, policy=policy, extra=extra)


def _whole(job: JobProfile, network: SharedLinks, cost: CollectiveCost) -> BucketLoad:
    """All weights, in one piece."""
    none = np.zeros(network.size)
    return BucketLoad(
        ready_at=1.0,
        size_bytes=job.gradient_bytes,
        sent_bytes=float(job.gradient_bytes),
        parameters=len(job.layers),
        cost=cost,
        main_s=none,
        land_s=none,
        lanes=min(4, max(1, job.gradient_bytes >> 20)),
    )


def _simulation(
    parts: _Parts,
    job: JobProfile,
    strategy: RunStrategy,
    engine: EngineCosts,
    moved_part: Floats | None = None,
) -> StepSimulation:
    return StepSimulation(
        parts.buckets,
        parts.costs,
        parts.network,
        engine,
        overlap=strategy.overlap,
        exchanges=job.exchanges if parts.buckets else 0,
        moved_part=moved_part,
    )


def _alone_s(simulation: StepSimulation, bucket: BucketLoad, engine: EngineCosts) -> float:
    """A collective that nothing hides."""
    cost = bucket.cost
    moving_s = float((simulation.moving_s(bucket) / simulation.quotas).max(initial=0.0))
    waits_s = (cost.steps * engine.latency_s + cost.latency_s) / bucket.lanes
    return max(moving_s, cost.s_per_byte * bucket.sent_bytes) + waits_s


def _no_less(step_s: float, parts: _Parts) -> float:
    """No step is shorter than what a CPU or a link is busy."""
    return max(step_s, float(parts.costs.wall_s.max()), float(parts.seconds_by_link().max(initial=0.0)))


def _served(parts: _Parts, job: JobProfile, strategy: RunStrategy, engine: EngineCosts) -> Prediction:
    """Workers do not wait for each other."""
    costs, network = parts.costs, parts.network
    alone_s = costs.wall_s + (costs.apply_s + costs.engine * engine.step_s) / costs.quotas
    whole_bytes = float(job.gradient_bytes)
    cost = network.of(served_phases(network.size, max(1, len(network.server_nodes))))

    def moving_s(cost: CollectiveCost) -> Floats:
        moved_s = cost.moved_s * whole_bytes + engine.message_s * cost.messages
        work_s: Floats = costs.engine * moved_s + costs.add_s * cost.added_fractions * whole_bytes
        seconds: Floats = work_s / costs.quotas
        return seconds

    cycle_s = serving_cycle_s(alone_s, network, whole_bytes, moving_s) if network.size > 1 else alone_s
    samples_per_s = float((np.array(strategy.shares) / cycle_s).sum())
    waits = cycle_s - alone_s
    served = _Parts(
        network=network,
        costs=costs,
        buckets=parts.buckets,
        policy=parts.policy,
        extra=[(_whole(job, network, cost), 1)] if network.size > 1 else [],
    )
    return _prediction(
        served,
        job,
        strategy,
        step_s=strategy.batch / samples_per_s,
        waits=waits,
        exposed_s=float(waits.max(initial=0.0)),
        apply_s=float((costs.apply_s / costs.quotas).max()),
    )


def _prediction(
    parts: _Parts,
    job: JobProfile,
    strategy: RunStrategy,
    *,
    step_s: float,
    waits: Floats,
    exposed_s: float,
    apply_s: float,
) -> Prediction:
    samples_per_s = strategy.batch / step_s if step_s > 0 else 0.0
    alone = 0.0
    for node in parts.network.nodes:
        cost = job.cost_on(node)
        alone += strategy.batch / max(cost.at(strategy.batch) + cost.apply_s, 1e-12)
    return Prediction(
        step_s=step_s,
        compute_s=tuple(float(one) for one in parts.costs.wall_s),
        exposed_s=exposed_s,
        apply_s=apply_s,
        wait_s=tuple(float(one) for one in waits),
        samples_per_s=samples_per_s,
        efficiency=samples_per_s / alone if alone else 0.0,
        link_bytes=parts.network.named_bytes(parts.bytes_by_link()),
        memory_bytes=tuple(job.memory_bytes(share) for share in strategy.shares),
        bottleneck=_bottleneck(parts, step_s),
        collectives=tuple(parts.network.used),
    )


def _bottleneck(parts: _Parts, step_s: float) -> str:
    """What is busy for the longest part of the step."""
    network, costs = parts.network, parts.costs
    computing_s = costs.wall_s + costs.apply_s / costs.quotas
    slowest = int(computing_s.argmax())
    found = [(float(computing_s[slowest]), f"computing on {network.nodes[slowest].name}")]
    seconds = parts.seconds_by_link()
    if seconds.max(initial=0.0) > 0:
        link = int(seconds.argmax())
        found.append((float(seconds[link]), network.link_name(link)))
    busiest_s, name = max(found)
    if busiest_s < step_s / 3:
        return "communication: messages and their CPU time, more than bytes or computing"
    return name


def _check(topology: Topology, strategy: RunStrategy) -> None:
    known = {node.name for node in topology.nodes}
    for name in strategy.nodes:
        if name not in known:
            raise ConfigError(
                f"the topology has no node {name}",
                where="strategy, nodes",
                fix=f"give nodes among {', '.join(sorted(known))}",
            )
    if len(strategy.shares) != len(strategy.nodes):
        raise ConfigError(
            f"{len(strategy.nodes)} nodes have {len(strategy.shares)} shares",
            where="strategy, shares",
            fix="give one share for each node",
        )
