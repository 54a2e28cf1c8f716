"""Replays a run of real training from its folder: the policy, the cluster, the arrivals and the decisions.

The policy's `ClusterInfo` is rebuilt from the plan, the measured links, and the learning rate in the
settings (a script's own learning rate is not recorded; the caller gives it if a policy needs it).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from echelon.errors import ConfigError
from echelon.observe.events import Arrived, Decided, LinkMeasured, read_events
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.simulate.replay import Mismatch, replay
from echelon.sync.cluster import best_rates, planned_cluster
from echelon.sync.families.serve import ServePolicy
from echelon.sync.policies.levels import Levels, units_of
from echelon.sync.policy import POLICIES, ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of replaying a run."""

    run: str
    policy: str
    arrivals: int
    decisions: int
    mismatch: Mismatch | None

    @property
    def same(self) -> bool:
        """Whether all decisions equal the recorded ones."""
        return self.mismatch is None


def replay_run(folder: RunFolder, lr: float | None = None) -> Replayed:
    """Feed the recorded arrivals of a run's coordinating server to its policy again."""
    plan = Plan.read(folder.plan)
    policy = POLICIES.build(plan.sync, where=str(folder.plan)).resolved()
    cluster = cluster_of(folder, plan, lr)
    if isinstance(policy, Levels):
        policy, cluster = policy.between, units_of(cluster)
    if not isinstance(policy, ServePolicy):
        raise ConfigError(
            f"sync {plan.sync} uses no parameter server, so there are no decisions to replay",
            where=str(folder.plan),
            fix="give a run with a parameter-server policy, such as async",
        )
    policy.check(cluster)
    seen = list(_of_server(folder, plan))
    arrivals = sum(isinstance(event, Arrived) for event in seen)
    if not arrivals:
        raise ConfigError(
            f"run {folder.name} has no recorded decisions of a server",
            where=str(folder.events),
            fix="give a run that was started with --servers and has made a step",
        )
    return Replayed(
        run=folder.name,
        policy=plan.sync,
        arrivals=arrivals,
        decisions=len(seen) - arrivals,
        mismatch=_replay_tables(seen, policy, cluster),
    )


def _replay_tables(
    seen: list[Arrived | Decided], policy: ServePolicy, cluster: ClusterInfo
) -> Mismatch | None:
    """Replay each optimizer's table with a rule of its own."""
    for table in sorted({event.table for event in seen}):
        mismatch = replay([event for event in seen if event.table == table], policy, cluster)
        if mismatch is not None:
            return mismatch
    return None


def _of_server(folder: RunFolder, plan: Plan) -> Iterator[Arrived | Decided]:
    """The arrivals and decisions of the first server, which coordinates."""
    file = folder.events_of(len(plan.workers))
    if file.is_file():
        yield from (event for event in read_events(file) if isinstance(event, Arrived | Decided))


def cluster_of(folder: RunFolder, plan: Plan, lr: float | None = None) -> ClusterInfo:
    """What the policy knew of the run's cluster."""
    return planned_cluster(
        plan,
        links=_links(folder, len(plan.workers)),
        lr=lr if lr is not None else _learning_rate(folder),
    )


def _links(folder: RunFolder, workers: int) -> tuple[float, ...]:
    """Each worker's best measured rate; empty if one is unknown."""
    files = [(rank, folder.events_of(rank)) for rank in range(workers)]
    measured = [
        (rank, event.bytes_per_s)
        for rank, file in files
        for event in (read_events(file) if file.is_file() else ())
        if isinstance(event, LinkMeasured) and event.rank == rank
    ]
    return best_rates(measured, workers)


class _Train(msgspec.Struct):
    lr: float | None = None


class _Settings(msgspec.Struct):
    train: _Train = msgspec.field(default_factory=_Train)


def _learning_rate(folder: RunFolder) -> float | None:
    try:
        return msgspec.toml.decode(folder.config.read_bytes(), type=_Settings).train.lr
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
