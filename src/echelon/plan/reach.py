"""Which nodes can take part at all, and which of them together? Every other node is named, with the reason.

A node is left out if it does not compute, if its memory does not hold the model with one sample, if its
link carries nothing, or if its site cannot be reached. Nodes that cannot reach the strongest ones could
still train by themselves, so they are kept apart as candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.config.units import show_memory
from echelon.plan.job import JobProfile
from echelon.plan.optimal_shares import most_share
from echelon.plan.plan import LeftOut
from echelon.plan.topology import Node, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Usable:
    """The nodes that can take part.

    together  those that all reach each other, in the order of the topology
    apart     sets of nodes that compute, but cannot reach `together`, strongest first
    left_out  why each node that is not in `together` is not
    """

    together: tuple[Node, ...]
    apart: tuple[tuple[Node, ...], ...]
    left_out: tuple[LeftOut, ...]


def usable_nodes(topology: Topology, job: JobProfile) -> Usable:
    """The nodes that can take part in a job; of sites that cannot reach each other, the strongest first.

    A site joins a set if it reaches all sites that are in it, in the order of their power.
    """
    unable = {node.name: _unable(node, job) for node in topology.nodes}
    able = [node for node in topology.nodes if not unable[node.name]]
    parts: list[tuple[Node, ...]] = []
    linked = [node for node in able if not _carries_nothing(node)]
    while linked:
        sites = _joined_sites(topology, linked, job)
        parts.append(tuple(node for node in linked if node.site in sites))
        linked = [node for node in linked if node.site not in sites]
    parts += [(node,) for node in able if _carries_nothing(node)]
    parts.sort(key=lambda part: -sum(1 / job.cost_on(node).at(1) for node in part))
    together = parts[0] if parts else ()
    why = []
    for node in topology.nodes:
        if unable[node.name]:
            why.append(LeftOut(node=node.name, why=unable[node.name]))
        elif node not in together:
            why.append(LeftOut(node=node.name, why=_unreached(node, together[0])))
    return Usable(together=together, apart=tuple(parts[1:]), left_out=tuple(why))


def _unreached(node: Node, other: Node) -> str:
    if _carries_nothing(node):
        return "its link carries nothing"
    if _carries_nothing(other):
        return f"the link of {other.name} carries nothing"
    return f"no link with bandwidth leads from {other.site} to its site {node.site}"


def reaches(topology: Topology, one: str, other: str) -> bool:
    """Whether something that is sent from one site arrives at the other."""
    try:
        route = topology.route(one, other)
    except KeyError:  # no uplinks lead there
        return False
    return all(uplink.bytes_per_s > 0 and math.isfinite(uplink.latency_s) for uplink in route)


def _unable(node: Node, job: JobProfile) -> str:
    """Why a node cannot compute its part; empty if it can."""
    if node.name not in job.costs and not node.speed > 0:
        return f"it does not compute: its speed is {node.speed:g}"
    if not math.isfinite(job.cost_on(node).at(1)):
        return "it does not compute: a sample takes forever"
    if job.cost_on(node).at(1) <= 0:
        return "its speed is not known: a sample takes no time"
    if not most_share(job, node):
        needs, has = show_memory(job.memory_bytes(1)), show_memory(node.memory_bytes)
        return f"a worker needs {needs} for the model and one sample, it has {has}"
    return ""


def _carries_nothing(node: Node) -> bool:
    rates = min(node.up_bytes_per_s, node.down_bytes_per_s)
    return not rates > 0 or not math.isfinite(node.latency_s)


def _joined_sites(topology: Topology, nodes: Sequence[Node], job: JobProfile) -> tuple[str, ...]:
    """Sites that all reach each other, strongest first: each is taken if it reaches those before it."""
    power: dict[str, float] = {}
    for node in nodes:
        power[node.site] = power.get(node.site, 0.0) + 1 / job.cost_on(node).at(1)
    joined: list[str] = []
    for site in sorted(power, key=lambda name: -power[name]):
        if all(reaches(topology, site, other) and reaches(topology, other, site) for other in joined):
            joined.append(site)
    return tuple(joined)
