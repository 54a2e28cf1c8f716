"""A predictor that fits on a screen: computing, then a ring; groups, overlap and factors as plain formulas.

It never predicts less than computing takes, and a faster node or link never makes a strategy slower.
"""

from __future__ import annotations

from echelon.plan.job import JobProfile
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Topology


def simple_prediction(topology: Topology, job: JobProfile, strategy: RunStrategy) -> Prediction:
    nodes = [topology.node(name) for name in strategy.nodes]
    costs = [job.cost_on(node) for node in nodes]
    compute = tuple(cost.at(share) for cost, share in zip(costs, strategy.shares, strict=True))
    size = job.gradient_bytes * (0.8 if strategy.factors else 1.0)
    size *= 1.0 if strategy.codec == "none" else 0.3
    if strategy.groups:
        groups = [[nodes[rank] for rank in group] for group in strategy.groups]
        inner = max(_ring_s(topology, group, size) for group in groups)
        comm = inner + _ring_s(topology, [group[0] for group in groups], size)
    else:
        comm = _ring_s(topology, nodes, size)
        comm *= {"ring": 1.0, "auto": 1.01, "halving-doubling": 0.99}.get(strategy.collective, 1.0)
    hidden = 0.6 if strategy.overlap == "step" else 0.3
    exposed = max(0.1 * comm, comm - hidden * max(compute))
    apply_s = max(cost.apply_s for cost in costs)
    step = max(compute) + exposed + apply_s
    alone = sum(job.batch / cost.at(job.batch) for cost in costs)
    return Prediction(
        step_s=step,
        compute_s=compute,
        exposed_s=exposed,
        apply_s=apply_s,
        wait_s=tuple(max(compute) - one for one in compute),
        samples_per_s=job.batch / step,
        efficiency=job.batch / step / alone,
        memory_bytes=tuple(job.memory_bytes(share) for share in strategy.shares),
        bottleneck=f"computing on {strategy.nodes[compute.index(max(compute))]}",
    )


def _ring_s(topology, nodes, size):
    count = len(nodes)
    if count == 1:
        return 0.0
    pairs = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    rate = min(topology.bytes_per_s(one, other) for one, other in pairs)
    late = max(topology.latency_s(one, other) for one, other in pairs)
    return 2 * (count - 1) * late + 2 * (count - 1) / count * size / rate
