"""Which workers are neighbours, and by which collective do they sum? From the links measured at the start.

When workers join, they measure links at the same time, some pairs each (comm/meet/links.py). Flows that
share an uplink show the part that each of them gets. Sites are found by the pairs' rates, and the rate of
an uplink is the sum of the flows that crossed it at once. What gradients take is predicted for every
candidate (plan/predict/), without computing; the cheapest is chosen. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.config.call import Call, parse_call
from echelon.config.units import show_seconds
from echelon.plan.groups import Groups
from echelon.plan.hierarchy import candidate_hierarchies
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.measured import PairMeasured
from echelon.plan.predict.predict import predict
from echelon.plan.sites import find_sites
from echelon.plan.strategy import RunStrategy
from echelon.plan.topology import Node, Topology, Uplink

Pair = tuple[int, int]  # sender's rank, receiver's rank
_WORTHWHILE = 0.9
_MOST_MEMBERS = 64  # candidates are costed one by one, while workers wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A collective, the groups of ranks that are neighbours, and what it is expected to bring."""

    collective: str
    groups: Groups
    seconds: float
    instead_s: float
    reason: str


def topology_of_links(
    latency_s: Mapping[Pair, float], bytes_per_s: Mapping[Pair, float], machines: Sequence[Sequence[int]]
) -> Topology:
    """Machines, named by their first ranks, with the sites that their links show."""
    home = {rank: at for at, ranks in enumerate(machines) for rank in ranks}
    names = [str(ranks[0]) for ranks in machines]
    rates: dict[Pair, float] = {}
    latencies: dict[Pair, float] = {}
    for (sender, receiver), rate in bytes_per_s.items():
        pair = home[sender], home[receiver]
        if pair[0] != pair[1]:
            rates[pair] = max(rate, rates.get(pair, 0.0))
            latencies[pair] = min(latency_s[sender, receiver], latencies.get(pair, 1e9))
    measured = [
        PairMeasured(
            sender=names[one], receiver=names[other], latency_s=latencies[one, other], bytes_per_s=rate
        )
        for (one, other), rate in rates.items()
    ]
    found = find_sites(measured, nodes=[Node(name=name) for name in names]).topology
    site_of = {rank: found.nodes[home[rank]].site for rank in home}
    return replace(
        found,
        uplinks=tuple(_filled(uplink, bytes_per_s, site_of, len(home)) for uplink in found.uplinks),
        known="measured when workers joined",
    )


def _filled(
    uplink: Uplink, bytes_per_s: Mapping[Pair, float], site_of: Mapping[int, str], size: int
) -> Uplink:
    """The uplink with the rate of all flows that crossed it at once, those of one shift of ranks."""
    sums: dict[tuple[int, str], float] = {}
    for (sender, receiver), rate in bytes_per_s.items():
        ends = site_of[sender], site_of[receiver]
        if set(ends) == set(uplink.between):
            key = (receiver - sender) % size, ends[0]
            sums[key] = sums.get(key, 0.0) + rate
    return replace(uplink, bytes_per_s=max(sums.values(), default=uplink.bytes_per_s))


def arrange(topology: Topology, machines: Sequence[Sequence[int]], length_bytes: int) -> Arranged | None:
    """The cheapest way to sum so many bytes over these machines; None if it is as they come, one by one.

    Without several sites it is: which collective is best for one network, collective `auto` knows.
    """
    if len(topology.sites) < 2 or len(machines) > _MOST_MEMBERS or not length_bytes:
        return None
    names = [str(ranks[0]) for ranks in machines]
    job = JobProfile(
        name="gradients",
        batch=len(names),
        cost=ComputeCost(fixed_s=0.0, per_sample_s=0.0),
        layers=(Layer(name="all", size_bytes=length_bytes),),
    )
    plain = RunStrategy(nodes=tuple(names), shares=(1,) * len(names))
    instead_s = predict(topology, job, plain).step_s
    found: list[tuple[float, RunStrategy]] = []
    for one in candidate_hierarchies(topology, names, most_levels=2):
        neighbours = one.ranks(names) or (tuple(names.index(name) for name in one.order),)
        strategy = replace(plain, groups=neighbours, collective=one.collective)
        found.append((predict(topology, job, strategy).step_s, strategy))
    seconds, strategy = min(found, key=lambda pair: pair[0])
    if seconds > _WORTHWHILE * instead_s:
        return None
    groups = tuple(tuple(rank for at in group for rank in machines[at]) for group in strategy.groups)
    reason = (
        f"{strategy.collective}: {_sites(topology, machines)}; about {show_seconds(seconds)} for all "
        f"gradients, {show_seconds(instead_s)} without regard to sites"
    )
    return Arranged(
        collective=_without_sizes(strategy.collective),
        groups=groups,
        seconds=seconds,
        instead_s=instead_s,
        reason=reason,
    )


def _sites(topology: Topology, machines: Sequence[Sequence[int]]) -> str:
    """The ranks of each site, in words."""
    members: dict[str, list[int]] = {}
    for node, ranks in zip(topology.nodes, machines, strict=True):
        members.setdefault(node.site, []).extend(ranks)
    listed = " and ".join(",".join(map(str, sorted(ranks))) for ranks in members.values())
    return f"ranks {listed} are {len(members)} sites"


def _without_sizes(collective: str) -> str:
    """Without the sizes of its groups, which follow from the groups."""
    call = parse_call(collective)
    options = {name: value for name, value in call.options.items() if name != "sizes"}
    return str(Call(call.name, call.args, options))
