"""What limits a job on these machines: computing, memory or communication? With the numbers that say so.

All usable nodes share the batch by speed. Three durations of a step are compared, and the longest names
the kind of the job (the first seed's three kinds):

    computing      forward and backward of the last worker, if no node lacked memory
    memory         what limits of memory add to that: shares that do not fit, nodes that hold no model
    communication  what computing does not hide of the exchange of gradients

Communication comes from a predictor, or else from the cost of a ring of all workers, of which the part is
hidden that fits between the first gradients of backward and its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from echelon.config.units import show_memory, show_seconds
from echelon.errors import PlanError
from echelon.plan.job import JobProfile
from echelon.plan.optimal_shares import best_shares, check_memory, most_share
from echelon.plan.reach import Usable, usable_nodes
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Node, Topology

Predictor = Callable[[Topology, JobProfile, RunStrategy], Prediction]
Bound = Literal["compute", "memory", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobKind:
    """What limits a job, why, and what follows.

    compute_s, memory_s, exposed_s   the three durations, see above
    needed_bytes                     memory of the worker with the largest share
    there_bytes                      memory of the node that has least
    why                              the numbers, in a sentence
    advice                           what follows for the strategy
    too_small                        nodes that do not hold the model
    """

    bound: Bound
    compute_s: float
    memory_s: float
    exposed_s: float
    needed_bytes: float
    there_bytes: float
    why: str
    advice: str
    too_small: tuple[str, ...] = ()


def classify(topology: Topology, job: JobProfile, *, predict: Predictor | None = None) -> JobKind:
    """Find what limits a job on a topology; PlanError if it does not fit at all."""
    check_memory(job, topology.nodes)
    usable = usable_nodes(topology, job)
    workers = _as_many_as_fit(usable, job)
    too_small = [node for node in topology.nodes if not most_share(job, node)]
    compute = [node for node in too_small if node.name in job.costs or node.speed > 0]
    shares = best_shares(
        [job.cost_on(node) for node in workers], job.batch, most=[most_share(job, node) for node in workers]
    )
    free_s = _level_s(job, _fastest(job, [*workers, *compute]))
    level_s = max(job.cost_on(node).at(share) for node, share in zip(workers, shares, strict=True))
    exposed_s = _exposed_s(topology, job, workers, shares, predict)
    compute_s = min(free_s, level_s)
    seconds: dict[Bound, float] = {
        "compute": compute_s,
        "memory": level_s - compute_s,
        "communication": exposed_s,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    needed = max(job.memory_bytes(share) for share in shares)
    small = tuple(node.name for node in too_small)
    return JobKind(
        bound=bound,
        compute_s=compute_s,
        memory_s=level_s - compute_s,
        exposed_s=exposed_s,
        needed_bytes=needed,
        there_bytes=min(node.memory_bytes for node in workers),
        why=_why(seconds, workers, needed, small),
        advice=_advice(bound, small),
        too_small=small,
    )


def _as_many_as_fit(usable: Usable, job: JobProfile) -> list[Node]:
    """The usable nodes, the fastest if the batch is smaller than their number; memory permitting."""
    if not usable.together:
        raise PlanError(
            "no node can take part",
            where="; ".join(f"{out.node}: {out.why}" for out in usable.left_out[:4]),
            fix="repair a node or its link, or describe the machines anew with `echelon probe`",
        )
    fitting = [part for part in (usable.together, *usable.apart) if _holds(job, part)]
    chosen = _fastest(job, fitting[0] if fitting else usable.together)
    check_memory(job, chosen)
    return chosen


def _holds(job: JobProfile, nodes: Sequence[Node]) -> bool:
    return sum(most_share(job, node) for node in nodes) >= job.batch


def _fastest(job: JobProfile, nodes: Sequence[Node]) -> list[Node]:
    """As many nodes as the batch has samples, in their order."""
    fastest = sorted(nodes, key=lambda node: (job.cost_on(node).at(1), node.name))[: job.batch]
    names = {node.name for node in fastest}
    return [node for node in nodes if node.name in names]


def _level_s(job: JobProfile, nodes: Sequence[Node]) -> float:
    """When the last worker has computed, if memory did not matter."""
    costs = [job.cost_on(node) for node in nodes]
    shares = best_shares(costs, job.batch)
    return max(cost.at(share) for cost, share in zip(costs, shares, strict=True))


def _exposed_s(
    topology: Topology,
    job: JobProfile,
    workers: Sequence[Node],
    shares: Sequence[int],
    predict: Predictor | None,
) -> float:
    if len(workers) == 1:
        return 0.0
    if predict is not None:
        names = tuple(node.name for node in workers)
        return predict(topology, job, RunStrategy(nodes=names, shares=tuple(shares))).exposed_s
    ring_s = ring_seconds(topology, job, workers)
    begins = min((layer.ready_at for layer in job.layers), default=1.0)
    level_s = min(job.cost_on(node).at(share) for node, share in zip(workers, shares, strict=True))
    return max(0.0, ring_s - (1 - begins) * level_s)


def ring_seconds(topology: Topology, job: JobProfile, workers: Sequence[Node]) -> float:
    """All gradients round a ring: 2(P-1) latencies, and 2(P-1)/P of the bytes on the worst link."""
    count = len(workers)
    if count == 1:
        return 0.0
    ordered = sorted(workers, key=lambda node: topology.sites.index(node.site))
    pairs = list(zip(ordered, [*ordered[1:], ordered[0]], strict=True))
    rate = min(topology.bytes_per_s(one, other) for one, other in pairs)
    latency_s = max(topology.latency_s(one, other) for one, other in pairs)
    rounds = 1 + job.exchanges
    moved = 2 * (count - 1) / count * job.gradient_bytes
    return rounds * 2 * (count - 1) * latency_s + moved / rate


def _why(seconds: dict[Bound, float], workers: Sequence[Node], needed: float, small: Sequence[str]) -> str:
    count = f"{len(workers)} node" + ("s" if len(workers) > 1 else "")
    least = min(workers, key=lambda node: node.memory_bytes)
    parts = [
        f"on {count} a step computes for {show_seconds(seconds['compute'])}",
        f"{show_seconds(seconds['communication'])} of communication are not hidden",
    ]
    if seconds["memory"] > 0:
        parts.append(f"limits of memory add {show_seconds(seconds['memory'])}")
    memory = f"the largest share needs {show_memory(needed)}"
    if needed > 0 and least.memory_bytes < float("inf"):
        memory += f", {least.name} has least with {show_memory(least.memory_bytes)}"
    if needed > 0:
        parts.append(memory)
    if small:
        parts.append(f"{_some(small)} cannot hold the model")
    return "; ".join(parts)


def _advice(bound: Bound, small: Sequence[str]) -> str:
    if bound == "compute":
        return "use all nodes, with shares by speed"
    if bound == "communication":
        return "use fewer nodes, sum inside groups first, overlap with backward or the step, send factors"
    if small:
        return f"leave out {_some(small)}; the others' shares are limited by their memory"
    return "shares are limited by memory: nodes with much memory take more than their speed says"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
