"""In which ways could some nodes run a job? Collectives, hierarchies, overlap, factors, codecs, policies.

Exact ways come first, and among equals the simpler one. A way that changes results (a codec, a policy other
than `full`) is listed only where the user allows it; what the user fixed is the only choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from echelon.config.choices import Overlap
from echelon.plan.groups import Groups
from echelon.plan.job import JobProfile
from echelon.plan.servers import best_servers
from echelon.plan.topology import Node, Topology

_FEWEST_FOR_GROUPS = 9  # three groups of three; fewer are as quick in one ring


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a search may choose from. One option means that the user fixed it.

    collectives   for all workers at once
    hierarchies   whether groups may sum first; `most_levels` limits how deep
    codecs        tried between all workers and, where there are sites, between sites only
    syncs         policies without servers
    served_syncs  policies that need servers
    servers       how many servers; 0 lets the cost decide
    shares        auto, equal or by-speed
    most_work     a limit of the search of many nodes: predictions, each counted once for each worker
    """

    collectives: tuple[str, ...] = ("auto", "ring", "halving-doubling")
    hierarchies: bool = True
    most_levels: int = 3
    overlaps: tuple[Overlap, ...] = ("backward", "step")
    factors: tuple[bool, ...] = (False, True)
    codecs: tuple[str, ...] = ("none", "error-feedback(bf16)", "one-bit", "top-k(ratio=0.01)")
    syncs: tuple[str, ...] = ("full",)
    served_syncs: tuple[str, ...] = ()
    servers: int = 0
    shares: Literal["auto", "equal", "by-speed"] = "auto"
    most_work: int = 60_000

    def exactly(self) -> SearchSpace:
        """Without what changes results, except where the user fixed it."""
        syncs = (*self.syncs, *self.served_syncs)
        fixed = len(syncs) == 1
        return replace(
            self,
            codecs=self.codecs if len(self.codecs) == 1 else ("none",),
            syncs=self.syncs if fixed else ("full",),
            served_syncs=self.served_syncs if fixed else (),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Who is whose neighbour: the nodes by rank, the groups that sum first, and the collective."""

    nodes: tuple[str, ...]
    groups: Groups = ()
    collective: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a job on some nodes; the shares are chosen apart."""

    arrangement: Arrangement
    codec: str = "none"
    overlap: Overlap = "backward"
    factors: bool = False
    sync: str = "full"
    servers: int = 0

    @property
    def options(self) -> tuple[str, Overlap, bool, str]:
        """The way without who is where."""
        return self.codec, self.overlap, self.factors, self.sync


# The hierarchies that are worth considering for some nodes, in at most so many levels.
Hierarchies = Callable[[Topology, Sequence[Node], int], list[Arrangement]]


def ways_of(
    topology: Topology,
    job: JobProfile,
    members: Sequence[Node],
    space: SearchSpace,
    hierarchies: Hierarchies | None = None,
) -> list[Way]:
    """All ways to run a job on these nodes, the simplest first."""
    flat = in_site_order(topology, members)
    if len(members) == 1:
        return [Way(arrangement=flat)]
    arrangements = [
        Arrangement(nodes=flat.nodes, groups=flat.groups, collective=name) for name in space.collectives
    ]
    if space.hierarchies:
        arrangements += (hierarchies or site_hierarchies)(topology, members, space.most_levels)
    ways = []
    if "full" in space.syncs:
        if "none" in space.codecs:
            ways += _exact_ways(job, arrangements, space)
        ways += _encoded_ways(topology, members, flat, space)
    ways += _inexact_ways(topology, job, members, flat, space)
    return ways


def _exact_ways(job: JobProfile, arrangements: Sequence[Arrangement], space: SearchSpace) -> list[Way]:
    linear = any(layer.factors != (0, 0) for layer in job.layers)
    factors = space.factors if linear or len(space.factors) == 1 else (False,)
    return [
        Way(arrangement=arrangement, overlap=overlap, factors=factor)
        for factor in factors
        for overlap in space.overlaps
        for arrangement in arrangements
    ]


def _encoded_ways(
    topology: Topology, members: Sequence[Node], flat: Arrangement, space: SearchSpace
) -> list[Way]:
    """Codecs between all workers, and between sites; a codec brings its own collective."""
    sites = site_groups(topology, members)
    ways = []
    for codec in space.codecs:
        if codec == "none":
            continue
        places = [(codec, flat)]
        if sites and not codec.startswith("between("):
            grouped = Arrangement(nodes=flat.nodes, groups=sites, collective="auto")
            places.append((f"between({codec})", grouped))
        ways += [
            Way(arrangement=arrangement, codec=name, overlap=overlap)
            for overlap in space.overlaps
            for name, arrangement in places
        ]
    return ways


def _inexact_ways(
    topology: Topology, job: JobProfile, members: Sequence[Node], flat: Arrangement, space: SearchSpace
) -> list[Way]:
    """Policies other than `full`: workers average weights, or servers keep them."""
    ways = [Way(arrangement=flat, sync=sync) for sync in space.syncs if sync != "full"]
    if space.served_syncs:
        servers = space.servers or best_servers(topology, job, members)
        ways += [Way(arrangement=flat, sync=sync, servers=servers) for sync in space.served_syncs]
    return ways


def in_site_order(topology: Topology, members: Sequence[Node]) -> Arrangement:
    """The nodes of a site are neighbours, so that a ring crosses each uplink as seldom as possible."""
    position = {site: index for index, site in enumerate(topology.sites)}
    ordered = sorted(members, key=lambda node: position[node.site])
    return Arrangement(nodes=tuple(node.name for node in ordered))


def site_groups(topology: Topology, members: Sequence[Node]) -> Groups:
    """The ranks of each site, in site order; empty if there is one site."""
    position = {site: index for index, site in enumerate(topology.sites)}
    found: dict[str, list[int]] = {}
    for rank, node in enumerate(sorted(members, key=lambda node: position[node.site])):
        found.setdefault(node.site, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values()) if len(found) > 1 else ()


def site_hierarchies(topology: Topology, members: Sequence[Node], most_levels: int) -> list[Arrangement]:
    """Sites sum first; within one site, about the square root of the nodes do."""
    flat = in_site_order(topology, members)
    if most_levels < 2:
        return []
    groups = site_groups(topology, members)
    if not groups and len(members) >= _FEWEST_FOR_GROUPS:
        groups = _square_root(len(members))
    if not groups or all(len(group) == 1 for group in groups):
        return []
    sizes = ", ".join(str(len(group)) for group in groups)
    return [
        Arrangement(
            nodes=flat.nodes,
            groups=groups,
            collective=f"hierarchical(sizes=[{sizes}], inner=ring, outer=ring{rails})",
        )
        for rails in ("", ", rails=false")
    ]


def _square_root(count: int) -> Groups:
    """About the square root of `count` groups, as equal as possible."""
    groups = math.isqrt(count)
    starts = [count * index // groups for index in range(groups + 1)]
    return tuple(tuple(range(start, stop)) for start, stop in pairwise(starts))
