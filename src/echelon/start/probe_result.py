"""What does a probe's raw data say? Nodes, sites, links, the cost of the job. Pure.

Speeds are relative to the fastest node, which the job's cost is that of; what a fixed small step takes
there is the topology's reference. Every node that was measured has a cost of its own besides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from echelon.config.units import show_seconds
from echelon.errors import ConfigError
from echelon.plan.cluster_file import show_rate
from echelon.plan.job import JobProfile
from echelon.plan.measured import FlowsMeasured, PairMeasured
from echelon.plan.sites import find_sites
from echelon.plan.topology import Node, Topology
from echelon.train.probe_job import NodeProbe, measured_pairs, shown_ages


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a probe found.

    reasons     sentences that say which sites and uplinks were found, and from what
    left_out    nodes that did not answer, and why
    ages_s      how old what came from the cache is: links, compute
    took_s      of measuring, once workers were connected; total_s of everything
    """

    topology: Topology
    job: JobProfile | None = None
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[NodeProbe, ...] = ()
    pairs: tuple[PairMeasured, ...] = ()
    flows: tuple[FlowsMeasured, ...] = ()
    ages_s: Mapping[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    total_s: float = 0.0

    def measured(self) -> dict[str, list[list[str]]]:
        """The raw measurements of links, as tables for a cluster file."""
        tables: dict[str, list[list[str]]] = {}
        if self.pairs:
            tables["pairs"] = [
                [p.sender, p.receiver, show_rate(p.bytes_per_s), show_seconds(p.latency_s)]
                for p in self.pairs
            ]
        if self.flows:
            tables["flows"] = [
                [
                    f"{sender} to {receiver}: {show_rate(rate)}"
                    for (sender, receiver), rate in zip(each.flows, each.bytes_per_s, strict=True)
                ]
                for each in self.flows
            ]
        return tables


def conclude(
    found: Sequence[NodeProbe], *, known: str, left_out: Mapping[str, str] | None = None
) -> Probed:
    """The topology and the job, from what the workers found, by rank."""
    names = node_names([each.node for each in found])
    speeds, job = _computing(found, names)
    reference_s = found[speeds.index(max(speeds))].step_s
    job = job and replace(job, reference_s=reference_s)
    nodes = [
        Node(
            name=name,
            speed=speed,
            cores=each.allowed.cores,
            memory_bytes=each.allowed.memory_bytes,
            reduce_bytes_per_s=each.reduce.best or Node(name=name).reduce_bytes_per_s,
            cache_bytes=each.allowed.cache_bytes,
            clock_offset_s=each.clock.offset_s,
        )
        for name, each, speed in zip(names, found, speeds, strict=True)
    ]
    measured = found[0].flows
    pairs = measured_pairs(names, measured.latency_s, measured.bytes_per_s)
    flows = [
        FlowsMeasured(
            flows=tuple((names[one], names[other]) for one, other in each.flows),
            bytes_per_s=each.bytes_per_s,
        )
        for each in measured.together
    ]
    notes = [note for each in found for note in each.notes]
    notes += [f"{name}: {each.misfit}" for name, each in zip(names, found, strict=True) if each.misfit]
    if not measured.complete:
        count = measured.size * (measured.size - 1)
        notes.append(f"{len(pairs)} of {count} directed pairs were measured, in the time that there was")
    topology, reasons = _placed(nodes, pairs, flows, known)
    return Probed(
        topology=replace(topology, reference_s=reference_s),
        job=job,
        reasons=reasons,
        notes=tuple(notes),
        left_out=left_out or {},
        nodes=tuple(found),
        pairs=tuple(pairs),
        flows=tuple(flows),
        ages_s=shown_ages(each.ages_s for each in found),
        took_s=max(each.took_s for each in found),
    )


def node_names(nodes: Sequence[str]) -> list[str]:
    """A name for each worker: its node's; with a number where several workers share a node."""
    count = Counter(nodes)
    seen: Counter[str] = Counter()
    names = []
    for node in nodes:
        names.append(node if count[node] == 1 else f"{node}-{seen[node]}")
        seen[node] += 1
    return names


def _placed(
    nodes: Sequence[Node], pairs: Sequence[PairMeasured], flows: Sequence[FlowsMeasured], known: str
) -> tuple[Topology, tuple[str, ...]]:
    """The nodes with their sites and links; if they cannot be told, all in one site."""
    if len(nodes) == 1:
        return Topology(nodes=tuple(nodes), known=known), ()
    try:
        sites = find_sites(pairs, flows, nodes=nodes)
    except ConfigError as error:
        return Topology(nodes=tuple(nodes), known=known), (f"No sites were found: {error.message}.",)
    return replace(sites.topology, known=known), sites.reasons


def _computing(found: Sequence[NodeProbe], names: Sequence[str]) -> tuple[list[float], JobProfile | None]:
    """Every node's speed, and the job with the costs of all nodes that it fits."""
    profiles = {name: each.profile for name, each in zip(names, found, strict=True) if each.profile}
    if not profiles:
        steps = [each.step_s for each in found]
        if not all(steps):  # the model fits nowhere
            return [1.0] * len(found), None
        return [min(steps) / step_s for step_s in steps], None
    share = max(1.0, next(iter(profiles.values())).batch / len(found))
    seconds = {name: profile.cost.at(share) + profile.cost.apply_s for name, profile in profiles.items()}
    fastest = min(seconds, key=lambda name: seconds[name])
    slowest_s = max(seconds.values())
    job = replace(
        profiles[fastest],
        base_bytes=max(profile.base_bytes for profile in profiles.values()),
        costs={name: profile.cost for name, profile in profiles.items()},
    )
    return [seconds[fastest] / seconds.get(name, slowest_s) for name in names], job
