"""What policies are told about a run's cluster, and who carries them out there. Pure.

This is the one place that makes either of them from a plan.
"""

from __future__ import annotations

from collections.abc import Iterable

from echelon.plan.plan import Plan
from echelon.sync.policy import POLICIES, ClusterInfo, Family


def planned_cluster(
    plan: Plan,
    *,
    servers: int | None = None,
    machines: int | None = None,
    links: tuple[float, ...] = (),
    lr: float | None = None,
) -> ClusterInfo:
    """The cluster as the plan describes it; `servers` and `machines` replace the plan's count."""
    return ClusterInfo(
        workers=len(plan.workers),
        servers=len(plan.servers) if servers is None else servers,
        machines=len({worker.node for worker in plan.workers}) if machines is None else machines,
        groups=plan.groups,
        shares=tuple(plan.weights),
        speeds=tuple(worker.speed for worker in plan.workers),
        links=links,
        lr=lr,
        seed=plan.seed,
    )


def carried_out(plan: Plan) -> tuple[Family, list[list[int]]]:
    """The family that carries out the plan's policy, and the groups that act as one worker each, if any.

    With one worker there is nobody to synchronise with: its gradients are reduced as they are.
    """
    if len(plan.workers) == 1:
        return "reduce", []
    family = POLICIES.build(plan.sync, where="--sync").resolved().family
    return family, [list(group) for group in plan.groups] if family == "levels" else []


def best_rates(measured: Iterable[tuple[int, float]], workers: int) -> tuple[float, ...]:
    """Each worker's best bytes per second, from pairs of rank and rate; empty if one has no rate."""
    best = [0.0] * workers
    for rank, rate in measured:
        if rank < workers:
            best[rank] = max(best[rank], rate)
    return tuple(best) if all(best) else ()
