"""In which ways could some nodes run a job? Collectives, hierarchies, overlap, factors, codecs, policies.

Exact ways come first, and among equals the simpler one. A way that changes results (a codec, a policy other
than `full`) is listed only where the user allows it; what the user fixed is the only choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from echelon.config.choices import Overlap
from echelon.plan.groups import Groups
from echelon.plan.hierarchy import Hierarchy, candidate_hierarchies, hierarchies_of_groups
from echelon.plan.job import JobProfile
from echelon.plan.servers import best_servers
from echelon.plan.topology import Node, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """What a search may choose from. One option means that the user fixed it.

    collectives   for all workers at once
    hierarchies   whether groups may sum first; `most_levels` limits how deep
    groups        names of nodes: if given, exactly these groups sum first, as far as their nodes take part
    codecs        tried between all workers and, where there are sites, between sites only
    syncs         policies without servers
    served_syncs  policies that need servers
    servers       how many servers; 0 lets the cost decide
    shares        auto, equal or by-speed
    all_nodes     no node is left out
    most_work     a limit of the search: predictions, each counted by its workers (`trials.work_of`)
    """

    collectives: tuple[str, ...] = ("auto", "ring", "halving-doubling")
    hierarchies: bool = True
    most_levels: int = 3
    groups: tuple[tuple[str, ...], ...] = ()
    overlaps: tuple[Overlap, ...] = ("backward", "step")
    factors: tuple[bool, ...] = (False, True)
    codecs: tuple[str, ...] = ("none", "error-feedback(bf16)", "one-bit", "top-k(ratio=0.01)")
    syncs: tuple[str, ...] = ("full", "local(8)")
    served_syncs: tuple[str, ...] = ()
    servers: int = 0
    shares: Literal["auto", "equal", "by-speed"] = "auto"
    all_nodes: bool = False
    most_work: int = 40_000

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
    """Who is whose neighbour: the nodes by rank, the groups that sum first, and the collective.

    `kind` is how the groups came about, empty without groups; `form` is the same for arrangements of other
    nodes in the same way.
    """

    nodes: tuple[str, ...]
    groups: Groups = ()
    collective: str = "auto"
    kind: str = ""
    form: str = "auto"


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


def ways_of(topology: Topology, job: JobProfile, members: Sequence[Node], space: SearchSpace) -> list[Way]:
    """All ways to run a job on these nodes, the simplest first."""
    flat = in_site_order(topology, members)
    if len(members) == 1:
        return [Way(arrangement=flat)]
    if space.groups:
        return _grouped_ways(topology, job, members, space)
    # Two workers use the same algorithm whatever its name.
    names = space.collectives if len(members) > 2 else space.collectives[:1]
    arrangements = [Arrangement(nodes=flat.nodes, collective=name, form=name) for name in names]
    if space.hierarchies:
        arrangements += hierarchies(topology, members, space.most_levels)
    ways = []
    if "full" in space.syncs:
        if "none" in space.codecs:
            ways += _exact_ways(job, arrangements, space)
        ways += _encoded_ways(topology, members, flat, space)
    ways += _inexact_ways(topology, job, members, flat, space)
    return ways


def _grouped_ways(
    topology: Topology, job: JobProfile, members: Sequence[Node], space: SearchSpace
) -> list[Way]:
    """The groups that the user asked for sum first; a codec then works between them."""
    chosen = {node.name for node in members}
    kept = [[name for name in group if name in chosen] for group in space.groups]
    found = _as_arrangements(hierarchies_of_groups(topology, [group for group in kept if group]))
    ways = _exact_ways(job, found, space) if "none" in space.codecs and "full" in space.syncs else []
    if "full" not in space.syncs or not found[0].groups:
        return ways
    between = replace(found[0], collective="auto", form="between groups")
    ways += [
        Way(
            arrangement=between,
            codec=codec if codec.startswith("between(") else f"between({codec})",
            overlap=overlap,
        )
        for codec in space.codecs
        if codec != "none"
        for overlap in space.overlaps
    ]
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
            grouped = Arrangement(nodes=flat.nodes, groups=sites, kind="sites", form="between sites")
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
    collective = space.collectives[0] if len(space.collectives) == 1 else flat.collective
    averaged = replace(flat, collective=collective, form=collective)
    # These ways have no codec: with a codec that the user fixed, they are not among the choices.
    tried = space.syncs if "none" in space.codecs or "full" not in space.syncs else ()
    ways = [Way(arrangement=averaged, sync=sync) for sync in tried if sync != "full"]
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


def hierarchies(topology: Topology, members: Sequence[Node], most_levels: int) -> list[Arrangement]:
    """Those worth comparing, as arrangements; the flat ring is not among them."""
    found = candidate_hierarchies(topology, [node.name for node in members], most_levels=most_levels)
    return _as_arrangements([one for one in found if one.levels or one.top != "ring"])


def _as_arrangements(found: Sequence[Hierarchy]) -> list[Arrangement]:
    return [
        Arrangement(
            nodes=one.order,
            groups=one.ranks(one.order),
            collective=one.collective,
            kind=one.shape if one.levels else one.top,
            form=_form(one),
        )
        for one in found
    ]


def _form(one: Hierarchy) -> str:
    """How it came about, and how each level sums, without the sizes."""
    levels = [f"{level.algorithm}{' with rails' * level.rails}" for level in one.levels]
    return f"{one.shape}: {', '.join([*levels, one.top])}"
