"""Which synchronizer a sync policy needs, and what the policy is told about the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from echelon.codec.fitting import refuse_for_weights
from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.open import open_solo
from echelon.comm.schedule.cost import LinkCost
from echelon.errors import ConfigError
from echelon.parallel.layout import Layout, Mesh, lines, mesh_of
from echelon.parallel.stage_shards import StageDivision
from echelon.parallel.strategies.data import Replicas
from echelon.parallel.strategies.pipeline import Pipeline
from echelon.parallel.strategies.sharded import Sharded
from echelon.plan.plan import Plan
from echelon.reduce.reducer import Inspector
from echelon.sync.cluster import best_rates, planned_cluster
from echelon.sync.families.mix import MixPolicy
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policies.levels import Levels
from echelon.sync.policy import POLICIES, ClusterInfo
from echelon.train.clock import StepClock
from echelon.train.encoding import Encoding
from echelon.train.families.levels import LevelsSynchronizer
from echelon.train.families.mix import MixSynchronizer
from echelon.train.families.reduce import ReduceSynchronizer
from echelon.train.families.serve import ServeSynchronizer
from echelon.train.families.shard import ShardSynchronizer
from echelon.train.families.share import ShareSynchronizer
from echelon.train.families.spread import SpreadSynchronizer
from echelon.train.families.synchronizer import Explain, Synchronizer


def joined_cluster(plan: Plan, group: Group, links: Links | None) -> ClusterInfo:
    """What policies are told about the workers that have joined."""
    measured = [(rank, rate) for (rank, _), rate in links.bytes_per_s.items()] if links else []
    return planned_cluster(
        plan,
        servers=len(group.servers),
        machines=group.machines,
        links=best_rates(measured, group.size),
    )


def choose(
    plan: Plan,
    group: Group,
    clock: StepClock,
    links: Links | None,
    explain: Explain,
    *,
    inspector: Inspector | None = None,
    copies: int = 1,
) -> Synchronizer:
    """The synchronizer of this run's policy.

    `inspector` looks at every round of gradients; `copies` is how many workers have the same samples.
    """
    policy = POLICIES.build(plan.sync, where="--sync").resolved()
    link: LinkCost | None = links.slowest if links else None
    if group.size == 1 or policy.family == "reduce":
        encoding = Encoding(plan.codec, group, links=links, sites=plan.groups, explain=explain)
        return ReduceSynchronizer(
            group,
            clock,
            link=link,
            encoding=encoding,
            explain=explain,
            inspector=inspector,
            copies=copies,
        )
    cluster = joined_cluster(plan, group, links)
    policy.check(replace(cluster, lr=1.0))  # checked again when the optimizer is known
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


@dataclass(frozen=True, slots=True)
class SpreadRun:
    """How a run with a layout goes: `view` has one worker for each replica, those with this one's stage."""

    synchronizer: Synchronizer
    mesh: Mesh
    view: Group


def spread_out(
    layout: Layout,
    group: Group,
    clock: StepClock,
    *,
    memory_bytes: float,
    links: Links | None,
    compared: Callable[[str], None],
    explain: Explain,
) -> SpreadRun:
    """The synchronizer of a layout in which workers have parts of a model; all workers call it."""
    sharded, pipeline = layout.find(Sharded), layout.find(Pipeline)
    mesh = mesh_of(layout, group.size)
    if pipeline is None:
        assert sharded is not None
        return SpreadRun(_sharded(layout, sharded, group, clock, compared), mesh, group)
    view: Group = open_solo()
    for stage in range(mesh.stages):
        peers = group.subgroup(mesh.peers(stage)) if mesh.replicas > 1 else None
        view = peers or view
    synchronizer = SpreadSynchronizer(
        group,
        mesh,
        pipeline,
        clock,
        memory_bytes=memory_bytes,
        links=links,
        compared=compared,
        explain=explain,
        division=_division(layout, sharded, group) if sharded is not None else None,
        offload=sharded.offload if sharded is not None else "",
    )
    return SpreadRun(synchronizer, mesh, view)


def _division(layout: Layout, sharded: Sharded, group: Group) -> StageDivision:
    """The workers that divide states with this one, and those with the same slices."""
    divides, across = (
        [one for line in lines(layout, group.size, kind) if (one := _among(group, line)) is not None]
        for kind in (Sharded, Replicas)
    )
    return StageDivision(
        level=sharded.level,
        divides=divides[0],
        across=across[0] if across[0].size > 1 else None,
        weights=sharded.weights or [1.0] * divides[0].size,
    )


def _among(group: Group, members: tuple[int, ...]) -> Group | None:
    """Some workers as a group; one worker has no other."""
    return group.subgroup(members) if group.size > 1 else group


def _sharded(
    layout: Layout, sharded: Sharded, group: Group, clock: StepClock, compared: Callable[[str], None]
) -> Synchronizer:
    division = _division(layout, sharded, group)
    return ShardSynchronizer(
        group,
        division.divides,
        division.across,
        clock,
        level=division.level,
        weights=division.weights,
        offload=sharded.offload,
        compared=compared,
    )
