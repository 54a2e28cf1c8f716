"""What would more or faster machines bring? Scaling curves, and the gain of each single change.

Changes are predicted with the same plan; a new node gets a share like the node that it is like, and the
batch stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from echelon.config.call import Call, Value, parse_call
from echelon.plan.job import ComputeCost, JobProfile
from echelon.plan.predict.engine_costs import EngineCosts
from echelon.plan.predict.predict import predict
from echelon.plan.shares import split
from echelon.plan.strategy import Prediction, RunStrategy
from echelon.plan.topology import Node, Topology

_MOST_LINKS = 16  # of nodes, each tried by itself; of more only the busiest
_WAYS = ("auto", "hierarchical")


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """One change: what, the step with it, and how many more samples per second, as a fraction."""

    what: str
    step_s: float
    samples_per_s: float
    gain: float


def scaling_curve(
    node: Node,
    job: JobProfile,
    counts: Sequence[int],
    engine: EngineCosts | None = None,
    *,
    grow: bool = False,
) -> list[tuple[int, Prediction]]:
    """Predictions for so many nodes like this one, each with its best exact collective.

    The global batch stays, with at least one sample for each node. With `grow` it grows with the nodes, and
    each node's share stays.
    """
    curve = []
    for count in counts:
        nodes = tuple(replace(node, name=f"{node.name}-{at}") for at in range(count))
        own = job.costs.get(node.name)
        like = replace(job, cost=own, costs={}) if own is not None else job
        if own is not None:
            nodes = tuple(replace(one, speed=1.0) for one in nodes)
        shares = (job.batch,) * count if grow else _equal(job.batch, count)
        topology = Topology(nodes=nodes, known=f"{count} nodes like {node.name}")
        names = tuple(one.name for one in nodes)
        ways = _WAYS if count > 3 else _WAYS[:1]
        found = [
            predict(topology, like, RunStrategy(nodes=names, shares=shares, collective=way), engine)
            for way in ways
        ]
        curve.append((count, min(found, key=lambda one: one.step_s)))
    return curve


def _equal(batch: int, count: int) -> tuple[int, ...]:
    return split(batch, (1.0,) * count) if batch >= count else (1,) * count


def what_helps(
    topology: Topology, job: JobProfile, strategy: RunStrategy, engine: EngineCosts | None = None
) -> list[Improvement]:
    """What single changes would bring, the best first."""
    base = predict(topology, job, strategy, engine)
    found = []
    for what, changed in _changes(topology, job, strategy, base):
        one = predict(*changed, engine)
        found.append(
            Improvement(
                what=what,
                step_s=one.step_s,
                samples_per_s=one.samples_per_s,
                gain=one.samples_per_s / base.samples_per_s - 1,
            )
        )
    return sorted(found, key=lambda one: -one.gain)


_Changed = tuple[Topology, JobProfile, RunStrategy]


def _changes(
    topology: Topology, job: JobProfile, strategy: RunStrategy, base: Prediction
) -> Iterator[tuple[str, _Changed]]:
    speeds = [1 / max(job.cost_on(topology.node(name)).at(1.0), 1e-12) for name in strategy.nodes]
    best, worst = speeds.index(max(speeds)), speeds.index(min(speeds))
    for rank in dict.fromkeys((best, worst)):
        changed = _with_another(topology, job, strategy, rank)
        yield f"one more node like {strategy.nodes[rank]}", changed
    slowest = max(range(len(speeds)), key=lambda rank: base.compute_s[rank])
    name = strategy.nodes[slowest]
    yield f"a CPU of twice the speed on {name}", (*_faster(topology, job, name), strategy)
    for uplink in topology.uplinks:
        wider = tuple(
            replace(one, bytes_per_s=2 * one.bytes_per_s) if one is uplink else one
            for one in topology.uplinks
        )
        yield f"twice the rate between {uplink.name}", (replace(topology, uplinks=wider), job, strategy)
    names = list(dict.fromkeys(strategy.nodes))
    if len(names) > _MOST_LINKS:
        names = [max(names, key=lambda one: base.link_bytes[one] / topology.node(one).up_bytes_per_s)]
    for one in names:
        yield f"a link of twice the rate for {one}", (_linked(topology, [one]), job, strategy)
    if len(names) > 1:
        yield "links of twice the rate for all nodes", (_linked(topology, names), job, strategy)


def _with_another(topology: Topology, job: JobProfile, strategy: RunStrategy, rank: int) -> _Changed:
    like = topology.node(strategy.nodes[rank])
    taken = {node.name for node in topology.nodes}
    name = next(one for at in range(len(taken) + 1) if (one := f"{like.name}-more-{at}") not in taken)
    costs = {**job.costs, name: job.costs[like.name]} if like.name in job.costs else job.costs
    weights = [float(share) for share in (*strategy.shares, strategy.shares[rank])]
    batch = max(strategy.batch, len(weights))
    groups = tuple((*group, len(strategy.nodes)) if rank in group else group for group in strategy.groups)
    changed = replace(
        strategy,
        nodes=(*strategy.nodes, name),
        shares=split(batch, weights),
        groups=groups,
        collective=_resized(strategy, rank),
    )
    more = replace(topology, nodes=(*topology.nodes, replace(like, name=name)))
    return more, replace(job, costs=costs), changed


def _resized(strategy: RunStrategy, rank: int) -> str:
    """The collective with one more worker in this rank's group."""
    call = parse_call(strategy.collective)
    sizes = call.options.get("sizes")
    if not isinstance(sizes, list):
        return strategy.collective
    grown: list[Value] = list(sizes)
    found = [at for at, group in enumerate(strategy.groups) if rank in group]
    at = found[0] if found else len(grown) - 1
    size = grown[at]
    grown[at] = size + 1 if isinstance(size, int) else size
    return str(Call(call.name, call.args, {**call.options, "sizes": grown}))


def _faster(topology: Topology, job: JobProfile, name: str) -> tuple[Topology, JobProfile]:
    nodes = tuple(
        replace(node, speed=2 * node.speed, cores=max(node.cores, min(1.0, 2 * node.cores)))
        if node.name == name
        else node
        for node in topology.nodes
    )
    costs = dict(job.costs)
    if name in costs:
        own = costs[name]
        costs[name] = ComputeCost(
            fixed_s=own.fixed_s / 2, per_sample_s=own.per_sample_s / 2, apply_s=own.apply_s / 2
        )
    return replace(topology, nodes=nodes), replace(job, costs=costs)


def _linked(topology: Topology, names: Sequence[str]) -> Topology:
    nodes = tuple(
        replace(node, up_bytes_per_s=2 * node.up_bytes_per_s, down_bytes_per_s=2 * node.down_bytes_per_s)
        if node.name in names
        else node
        for node in topology.nodes
    )
    return replace(topology, nodes=nodes)
