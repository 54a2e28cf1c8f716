"""Which way of agreeing a sync policy asks for, and what it is told about the crew."""

from __future__ import annotations

from dataclasses import replace

from echelon.codec.fitting import refuse_for_weights
from echelon.comm.alone import Alone
from echelon.comm.cost import Link
from echelon.comm.engine import EngineGroup
from echelon.comm.group import Group
from echelon.comm.links import Links
from echelon.comm.rails import machines
from echelon.errors import ConfigError
from echelon.plan.plan import Plan
from echelon.sync.mixed import Mixed
from echelon.sync.policies.levels import Levels
from echelon.sync.policy import POLICIES, Crew, Policy
from echelon.sync.served import Served
from echelon.train.agreement import Agreement, Explain
from echelon.train.by_levels import ByLevels
from echelon.train.by_mixing import ByMixing
from echelon.train.by_server import ByServer
from echelon.train.clock import StepClock
from echelon.train.encoding import Encoding
from echelon.train.in_step import InStep
from echelon.train.one_memory import OneMemory


def crew_of(plan: Plan, group: Group, links: Links | None) -> Crew:
    """What policies may know of a run."""
    places = machines(group.members[: group.size]) if isinstance(group, EngineGroup) else [[]]
    servers = len(group.servers) if isinstance(group, EngineGroup) else 0
    return Crew(
        workers=group.size,
        servers=servers,
        machines=len(places),
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


def choose(plan: Plan, group: Group, clock: StepClock, links: Links | None, explain: Explain) -> Agreement:
    """How this run's workers agree."""
    policy = POLICIES.build(plan.sync, where="--sync").resolved()
    link: Link | None = links.slowest if links else None
    if isinstance(group, Alone) or policy.family == "reduce":
        encoding = Encoding(plan.codec, group, links=links, sites=plan.groups, explain=explain)
        return InStep(group, clock, link=link, encoding=encoding, explain=explain)
    crew = crew_of(plan, group, links)
    policy.check(replace(crew, lr=1.0))  # again with the real one when the optimizer is there
    if isinstance(policy, Mixed):
        refuse_for_weights(plan.codec, policy.name)
        return ByMixing(group, clock, policy, crew, explain=explain)
    own = _own_transport(group, policy)
    if isinstance(policy, Levels):
        return ByLevels(
            own,
            clock,
            policy,
            crew,
            link=link,
            replicas=plan.replicas,
            codec=plan.codec,
            explain=explain,
        )
    if isinstance(policy, Served):
        return ByServer(
            own,
            clock,
            policy,
            plan.sync,
            crew,
            replicas=plan.replicas,
            codec=plan.codec,
            explain=explain,
        )
    refuse_for_weights(plan.codec, policy.name)
    return OneMemory(own, clock, explain=explain)


def needs_keepers(policy: Policy) -> bool:
    """Whether servers keep parameters, and do not just sum."""
    return policy.family == "serve" or (isinstance(policy, Levels) and policy.between.family == "serve")


def _own_transport(group: Group, policy: Policy) -> EngineGroup:
    if isinstance(group, EngineGroup):
        return group
    raise ConfigError(
        f"sync {policy.name} works on Echelon's own transports, not on torch.distributed",
        where="--transport",
        fix="use auto, shm or tcp",
    )
