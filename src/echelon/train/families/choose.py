"""Which way of agreeing a sync policy asks for, and what it is told about the crew."""

from __future__ import annotations

from dataclasses import replace

from echelon.codec.fitting import refuse_for_weights
from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.schedule.cost import LinkCost
from echelon.errors import ConfigError
from echelon.plan.plan import Plan
from echelon.sync.families.mix import MixPolicy
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policies.levels import Levels
from echelon.sync.policy import POLICIES, ClusterInfo, Policy
from echelon.train.clock import StepClock
from echelon.train.encoding import Encoding
from echelon.train.families.levels import LevelsSynchronizer
from echelon.train.families.mix import MixSynchronizer
from echelon.train.families.reduce import ReduceSynchronizer
from echelon.train.families.serve import ServeSynchronizer
from echelon.train.families.share import ShareSynchronizer
from echelon.train.families.synchronizer import Explain, Synchronizer


def cluster_of(plan: Plan, group: Group, links: Links | None) -> ClusterInfo:
    """What policies may know of a run."""
    return ClusterInfo(
        workers=group.size,
        servers=len(group.servers),
        machines=group.machines,
        groups=plan.groups,
        shares=tuple(plan.weights),
        speeds=tuple(worker.speed for worker in plan.workers),
        links=_rates(links, group.size),
        seed=plan.seed,
    )


def _rates(links: Links | None, workers: int) -> tuple[float, ...]:
    """Each worker's best measured rate; nothing if anybody's is unknown."""
    if links is None:
        return ()
    best = [
        max((rate for (rank, _), rate in links.bytes_per_s.items() if rank == worker), default=0.0)
        for worker in range(workers)
    ]
    return tuple(best) if all(best) else ()


def choose(
    plan: Plan, group: Group, clock: StepClock, links: Links | None, explain: Explain
) -> Synchronizer:
    """How this run's workers agree."""
    policy = POLICIES.build(plan.sync, where="--sync").resolved()
    link: LinkCost | None = links.slowest if links else None
    if group.size == 1 or policy.family == "reduce":
        encoding = Encoding(plan.codec, group, links=links, sites=plan.groups, explain=explain)
        return ReduceSynchronizer(group, clock, link=link, encoding=encoding, explain=explain)
    cluster = cluster_of(plan, group, links)
    policy.check(replace(cluster, lr=1.0))  # again with the real one when the optimizer is there
    if isinstance(policy, MixPolicy):
        refuse_for_weights(plan.codec, policy.name)
        return MixSynchronizer(group, clock, policy, cluster, explain=explain)
    if not group.own_transport:
        raise ConfigError(
            f"sync {policy.name} works on Echelon's own transports, not on torch.distributed",
            where="--transport",
            fix="use auto, shm or tcp",
        )
    if isinstance(policy, Levels):
        return LevelsSynchronizer(
            group,
            clock,
            policy,
            cluster,
            link=link,
            replicas=plan.replicas,
            codec=plan.codec,
            explain=explain,
        )
    if isinstance(policy, ServePolicy):
        return ServeSynchronizer(
            group,
            clock,
            policy,
            plan.sync,
            cluster,
            replicas=plan.replicas,
            codec=plan.codec,
            explain=explain,
        )
    refuse_for_weights(plan.codec, policy.name)
    return ShareSynchronizer(group, clock, explain=explain)


def needs_parameter_servers(policy: Policy) -> bool:
    """Whether servers keep parameters, and do not just sum."""
    return policy.family == "serve" or (isinstance(policy, Levels) and policy.between.family == "serve")
