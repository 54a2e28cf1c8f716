"""Which nodes share a site, and what joins the sites? Found in what a probe measured.

Sites come from distances (plan/distances.py): pairs whose rate is lower, or whose latency is higher, than
the two nodes' own links explain. Then from flows at the same time: nodes that lose rate to others, although
no node's link is shared, have a line between them. The links are fitted to the sites (plan/fit.py).

Not every difference can be seen. A single machine behind a slow uplink measures like a machine with a slow
link, and is taken for that one; the two behave alike. A machine whose own link is slower than the uplinks
could be in any site: flows at the same time tell, without them it is a site of its own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from echelon.errors import ConfigError
from echelon.plan.distances import Matrix, by_flows, by_pairs, clusters
from echelon.plan.fit import Measurements, error, fit, is_connected
from echelon.plan.measured import Flow, FlowsMeasured, PairMeasured
from echelon.plan.site_reasons import reasons
from echelon.plan.topology import Node, Topology

_CLEAR = 0.7  # another assignment of nodes to sites must reduce the error to this part
_AS_WELL = 1.1
_UNSURE = 0.25  # distances (log 2 of a factor) that differ by less do not tell two sites apart
_NEAR = 0.5
_ROUNDS = 6
_MOST_FLOWS = 8
_MOST_MET = 6

Clusters = list[list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SitesFound:
    """The topology, and sentences that say what it was concluded from."""

    topology: Topology
    reasons: tuple[str, ...]


def find_sites(
    pairs: Sequence[PairMeasured], flows: Sequence[FlowsMeasured] = (), *, nodes: Sequence[Node] = ()
) -> SitesFound:
    """Sites, links and uplinks. `nodes` say what else is known; without them, all that were measured."""
    seen = dict.fromkeys(name for pair in pairs for name in (pair.sender, pair.receiver))
    nodes = tuple(nodes) or tuple(Node(name=name) for name in seen)
    _check(nodes, seen)
    known = {node.name for node in nodes}
    measured = Measurements(
        nodes=nodes,
        pairs=tuple(pair for pair in pairs if {pair.sender, pair.receiver} <= known),
        flows=tuple(one for one in flows if {name for flow in one.flows for name in flow} <= known),
    )
    if len(nodes) == 1:
        alone = Topology(nodes=(replace(nodes[0], site="main"),), known="measured by a probe")
        return SitesFound(topology=alone, reasons=("There is one node.",))
    topology = fit(measured, _site_names(_found(measured)))
    if not is_connected(topology):
        raise _apart(topology)
    return SitesFound(topology=topology, reasons=reasons(topology, measured))


def worthwhile_pairs(nodes: Sequence[str], pairs: Sequence[PairMeasured]) -> list[Flow]:
    """Pairs to measure next, both ways, if only a sample was: each node with each site that it never met.

    A node that met nobody of its own site looks as if its link were slow: it fits several sites, so it is
    one of its own. Such nodes are also measured with the first of them, which may be of their site.
    """
    names = list(dict.fromkeys(nodes))
    if len(names) < 3:
        return []
    found = find_sites(pairs, nodes=[Node(name=name) for name in names]).topology
    met: dict[str, set[str]] = {name: {name} for name in names}
    for pair in pairs:
        met.setdefault(pair.sender, set()).add(pair.receiver)
        met.setdefault(pair.receiver, set()).add(pair.sender)
    sites = [{node.name for node in found.nodes if node.site == site} for site in found.sites]
    wanted: dict[frozenset[str], Flow] = {}
    # Small sites may be parts of larger ones that nothing has joined yet.
    for site in sorted(sites, key=len, reverse=True)[:_MOST_MET]:
        known = max(sorted(site), key=lambda name: len(met[name] & site))
        wanted |= {
            frozenset((name, known)): (name, known) for name in names if not met[name] & site - {name}
        }
    singles = [name for name in names if {name} in sites]
    wanted |= {
        frozenset((name, singles[0])): (name, singles[0])
        for name in singles[1:]
        if name not in met[singles[0]]
    }
    asked = [flow for flow in wanted.values() if flow[0] != flow[1]]
    return [flow for one, other in asked for flow in ((one, other), (other, one))]


def worthwhile_flows(
    nodes: Sequence[str],
    pairs: Sequence[PairMeasured],
    flows: Sequence[FlowsMeasured] = (),
    *,
    most: int = 12,
) -> list[tuple[Flow, ...]]:
    """Sets of flows to measure at the same time next, the most telling first; at most `most`.

    `flows` were measured already: what they tell is used, and they are not asked for again.

    Between two sites: as many flows as possible at once, whose sum is the uplink's rate. With three or more
    sites: from one to all others, which tells whether they are reached through the same uplink. For a node
    that could be in several sites: together with a flow of each. Inside a site: all nodes in pairs, both
    ways, with new partners in each round, which finds lines as fast as a node's link that several share.
    """
    names = list(dict.fromkeys(nodes))
    if len(names) < 3:
        return []
    found = find_sites(pairs, flows, nodes=[Node(name=name) for name in names]).topology
    groups = [[node.name for node in found.nodes if node.site == site] for site in found.sites]
    wanted = [_between(one, other) for one, other in combinations(groups, 2)]
    if len(groups) > 2:
        wanted += [_outward(group, [one for one in groups if one is not group]) for group in groups]
        wanted += _for_singles(groups)
    rounds = [_rounds(group) for group in groups if len(group) > 3]
    wanted += [one[at] for at in range(_ROUNDS) for one in rounds if at < len(one)]
    done = {one.flows for one in flows}
    return [one for one in dict.fromkeys(wanted) if len(one) > 1 and one not in done][:most]


def _between(one: Sequence[str], other: Sequence[str]) -> tuple[Flow, ...]:
    """As many flows as the smaller site has members; the larger site's links are never the limit."""
    return tuple(zip(one, other, strict=False))[:_MOST_FLOWS]


def _outward(group: Sequence[str], others: Sequence[Sequence[str]]) -> tuple[Flow, ...]:
    """To each other site, a flow from a member of its own where there are enough."""
    return tuple((group[at % len(group)], other[0]) for at, other in enumerate(others[:_MOST_FLOWS]))


def _for_singles(groups: Clusters) -> list[tuple[Flow, ...]]:
    """For each single node: does it share the line of one site to another?"""
    singles = [group[0] for group in groups if len(group) == 1]
    sites = [group for group in groups if len(group) > 1]
    return [
        ((name, other[0]), (one[0], other[1]))
        for name in singles
        for one in sites
        for other in sites
        if one is not other
    ]


def _rounds(group: Sequence[str]) -> list[tuple[Flow, ...]]:
    """All members in pairs, each pair once (the circle method of tournaments); both ways at once."""
    players: list[str | None] = [*group, *([None] if len(group) % 2 else [])]
    first, rest = players[0], players[1:]
    found = []
    for _ in range(len(rest)):
        row = [first, *rest]
        met = zip(row[: len(row) // 2], reversed(row[len(row) // 2 :]), strict=True)
        pairs = [(one, other) for one, other in met if one is not None and other is not None]
        found.append(tuple(flow for one, other in pairs for flow in ((one, other), (other, one))))
        rest = rest[1:] + rest[:1]
    return found


def _found(measured: Measurements) -> Clusters:
    """By distance, then nodes that could be in several sites, then split by flows; in the nodes' order."""
    names = [node.name for node in measured.nodes]
    distances = by_pairs(names, measured.pairs)
    found = _settled(clusters(names, distances), names, distances, measured)
    found = _split(found, measured)
    place = {name: at for at, name in enumerate(names)}
    return sorted((sorted(group, key=place.__getitem__) for group in found), key=lambda one: place[one[0]])


def _split(found: Clusters, measured: Measurements) -> Clusters:
    """Sites whose members lose rate to each other when they send at the same time are several."""
    names = [node.name for node in measured.nodes]
    lost = by_flows(names, measured.flows, measured.alone)
    place = {name: at for at, name in enumerate(names)}
    for group in list(found):
        places = [place[name] for name in group]
        if np.isnan(lost[np.ix_(places, places)]).all():
            continue
        parts = clusters(group, lost[np.ix_(places, places)])
        if len(parts) < 2 or min(map(len, parts)) < 2 or not _all_known(parts, place, lost):
            continue
        split = [one for other in found for one in (parts if other is group else [other])]
        if _error(split, measured) < _CLEAR * _error(found, measured):
            found = split
    return found


def _all_known(parts: Clusters, place: Mapping[str, int], lost: Matrix) -> bool:
    """Whether any flow went between each two parts; otherwise they only look apart."""
    places = [[place[name] for name in part] for part in parts]
    return all(not np.isnan(lost[np.ix_(one, other)]).all() for one, other in combinations(places, 2))


def _settled(found: Clusters, names: Sequence[str], distances: Matrix, measured: Measurements) -> Clusters:
    """Nodes that are as near to another site as to their own: where flows fit best, or on their own."""
    unsure = _unsure(found, names, distances)
    sent = {name for one in measured.flows for flow in one.flows for name in flow}
    for name, possible in unsure.items():
        rest = [left for group in found if (left := [other for other in group if other != name])]
        alone = [*rest, [name]]
        if name not in sent:
            found = alone
            continue
        tried = [
            [[*group, name] if set(group) & home else group for group in rest]
            for home in possible
            if any(set(group) & home for group in rest)
        ]
        errors = sorted((_error(one, measured, name), at) for at, one in enumerate(tried))
        # Alone it can be reached through either site, so the best site may fit as well, but not better.
        clear = len(errors) > 1 and errors[0][0] < _CLEAR * errors[1][0]
        fits = clear and errors[0][0] < _AS_WELL * _error(alone, measured, name)
        found = tried[errors[0][1]] if fits else alone
    return found


def _unsure(found: Clusters, names: Sequence[str], distances: Matrix) -> dict[str, list[set[str]]]:
    """For each node that could be in several sites, the sure members of these."""
    at = {name: place for place, name in enumerate(names)}
    sites = [set(group) for group in found if len(group) > 1]
    unsure: dict[str, list[set[str]]] = {}
    for name in names if len(sites) > 1 else []:
        row = distances[at[name]]
        near = [_mean(row[[at[other] for other in site if other != name]]) for site in sites]
        fits = [
            site for site, far in zip(sites, near, strict=True) if far < min(_NEAR, min(near) + _UNSURE)
        ]
        if len(fits) > 1:
            unsure[name] = fits
    return {name: [site - unsure.keys() for site in fits] for name, fits in unsure.items()}


def _mean(distances: Matrix) -> float:
    known = distances[~np.isnan(distances)]
    return float(known.mean()) if len(known) else math.inf


def _error(found: Clusters, measured: Measurements, name: str | None = None) -> float:
    """Of the topology with these sites; with a name, of what was measured with that node."""
    topology = fit(measured, {member: str(at) for at, group in enumerate(found) for member in group})
    if not is_connected(topology):
        return math.inf
    if name is not None:
        pairs = tuple(pair for pair in measured.pairs if name in (pair.sender, pair.receiver))
        flows = tuple(one for one in measured.flows if any(name in flow for flow in one.flows))
        measured = replace(measured, pairs=pairs, flows=flows)
    return error(topology, measured)


def _site_names(found: Clusters) -> Mapping[str, str]:
    """Each node's site: named as its nodes begin if no other site's nodes begin alike."""
    if len(found) == 1:
        return dict.fromkeys(found[0], "main")
    begins = [{re.split(r"[-_.]?\d*$", name)[0] for name in group} for group in found]
    sites: dict[str, str] = {}
    for at, (group, own) in enumerate(zip(found, begins, strict=True)):
        clear = len(own) == 1 and sum(bool(own & other) for other in begins) == 1
        name = next(iter(own)) if clear and own != {""} else f"site-{at + 1}"
        sites |= dict.fromkeys(group, name)
    return sites


def _check(nodes: Sequence[Node], seen: Mapping[str, None]) -> None:
    missing = [node.name for node in nodes if node.name not in seen]
    if not nodes or (missing and len(nodes) > 1):
        raise ConfigError(
            f"nothing was measured with {', '.join(missing)}" if missing else "nothing was measured",
            where="sites from measurements",
            fix="measure at least one pair of each node, or leave it out",
        )


def _apart(topology: Topology) -> ConfigError:
    first = topology.sites[0]
    names = [node.name for node in topology.nodes if node.site == first]
    others = [node.name for node in topology.nodes if node.site != first]
    return ConfigError(
        f"nothing was measured between {names[0]} and {others[0]}, nor between others of their sites",
        where="sites from measurements",
        fix="measure pairs that join all nodes",
    )
