"""Which links and uplinks explain what was measured, if it is given who is in which site?

A node's link is as fast as its best rates. An uplink is as fast as a pair of nodes is that gets less than
both their links allow, or as all flows together that lose something when they send at the same time. If
neither happened, it has at least the largest rate that was seen on it, and gets that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median

from echelon.plan.distances import best_rates, latencies, own_latencies
from echelon.plan.fair import fair_rates
from echelon.plan.measured import Flow, FlowsMeasured, PairMeasured
from echelon.plan.topology import Node, Topology, Uplink

LIMITED = 0.75  # a flow with less than this part of what its nodes' links allow is limited by an uplink
_CLEAR = 0.7  # another model must reduce the error to this part
_NOISE = 1.3
_MOST_SITES = 12  # with more, each pair of sites keeps an uplink of its own
_Sites = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that a probe measured, and the nodes with what else is known about them."""

    nodes: tuple[Node, ...]
    pairs: tuple[PairMeasured, ...]
    flows: tuple[FlowsMeasured, ...] = ()

    def alone(self) -> dict[Flow, float]:
        """The rate of each pair that was measured."""
        return {(pair.sender, pair.receiver): pair.bytes_per_s for pair in self.pairs}


def fit(measured: Measurements, sites: _Sites) -> Topology:
    """The nodes and uplinks; sites between which nothing was measured have none."""
    bare = Topology(nodes=_nodes(measured, sites), known="measured by a probe")
    joined = {_ordered(sites[one], sites[other]) for one, other in measured.alone()}
    order = bare.sites
    between = [pair for pair in combinations(order, 2) if _ordered(*pair) in joined]
    best = _with_uplinks(bare, between, measured)
    if len(order) > _MOST_SITES or not measured.flows:
        return best
    # A site may be reached through another one. Only flows at the same time can tell.
    while True:
        fewer = [[pair for pair in between if pair != left] for left in between]
        tried = [
            (error(topology, measured), topology, kept)
            for kept in fewer
            if (topology := _with_uplinks(bare, kept, measured)) and is_connected(topology)
        ]
        least = min(tried, key=lambda one: one[0], default=None)
        if least is None or least[0] > _CLEAR * error(best, measured):
            return best
        _, best, between = least


def error(topology: Topology, measured: Measurements) -> float:
    """How far predicted rates are from measured ones: mean square of log 2, of pairs and of flows."""
    alone = [
        _miss(rate, topology.bytes_per_s(topology.node(sender), topology.node(receiver)))
        for (sender, receiver), rate in measured.alone().items()
    ]
    together = [
        _miss(rate, expected)
        for one in measured.flows
        for rate, expected in zip(one.bytes_per_s, fair_rates(topology, one.flows), strict=True)
    ]
    return sum(fmean(part) for part in (alone, together) if part)


def _miss(rate: float, expected: float) -> float:
    return min(abs(math.log2(rate / max(expected, 1e-9))), 4.0) ** 2


def _nodes(measured: Measurements, sites: _Sites) -> tuple[Node, ...]:
    rates = measured.alone()
    up, down = best_rates(rates, 0), best_rates(rates, 1)
    inside = {pair: part for pair, part in latencies(measured.pairs).items() if _same(sites, *pair)}
    own = own_latencies(inside)
    usual = median(own.values()) if own else 0.0
    return tuple(
        replace(
            node,
            site=sites[node.name],
            up_bytes_per_s=up.get(node.name, math.inf),
            down_bytes_per_s=down.get(node.name, math.inf),
            latency_s=own.get(node.name, usual),
        )
        for node in measured.nodes
    )


def _with_uplinks(bare: Topology, between: Sequence[Flow], measured: Measurements) -> Topology:
    """The uplinks that are named, each with its rate and latency."""
    free = replace(bare, uplinks=tuple(Uplink(between=pair) for pair in between))
    if not is_connected(free):
        return free
    loads = _loads(free, measured)
    uplinks = []
    for uplink in free.uplinks:
        ways = [_rate(loads.get((uplink.name, site), _Load())) for site in uplink.between]
        limited = [rate for rate, is_limit in ways if is_limit]
        rate = min(limited) if limited else max(rate for rate, _ in ways)
        late = _latency_s(free, uplink, measured)
        uplinks.append(replace(uplink, bytes_per_s=rate or math.inf, latency_s=late))
    return replace(free, uplinks=tuple(uplinks))


class _Load:
    """What was seen on one direction of an uplink: of single flows, and of flows together."""

    def __init__(self) -> None:
        self.single: list[float] = []
        self.limited: list[float] = []
        self.sums: list[float] = []
        self.full: list[float] = []


def _loads(free: Topology, measured: Measurements) -> dict[Flow, _Load]:
    """By the uplink's name and the site that the flows leave."""
    found: dict[Flow, _Load] = {}
    for flow, rate in measured.alone().items():
        sender, receiver = (free.node(name) for name in flow)
        crossed = _crossed(free, flow)
        if len(crossed) == 1:  # further away it is not known which of the uplinks limits
            load = found.setdefault(crossed[0], _Load())
            load.single.append(rate)
            if rate < LIMITED * free.bytes_per_s(sender, receiver):
                load.limited.append(rate)
    for one in measured.flows:
        possible = fair_rates(free, one.flows)
        sums: dict[Flow, list[float]] = {}
        for flow, rate, most in zip(one.flows, one.bytes_per_s, possible, strict=True):
            for crossed_one in _crossed(free, flow):
                total = sums.setdefault(crossed_one, [0.0, 0.0])
                total[0] += rate
                total[1] += most
        for line, (rate, most) in sums.items():
            load = found.setdefault(line, _Load())
            load.sums.append(rate)
            if rate < LIMITED * most:
                load.full.append(rate)
    return found


def _rate(load: _Load) -> tuple[float, bool]:
    """The rate of one direction, and whether it is the line's limit or only the largest that was seen."""
    single = fmean(load.limited) if 2 * len(load.limited) > len(load.single) else 0.0
    limit = max(single, median(load.full) if load.full else 0.0)
    seen = max([*load.sums, *load.single], default=0.0)
    # More was seen than the limit: single flows are limited each on its own, or on another uplink.
    return (limit, True) if limit and seen < _NOISE * limit else (seen, False)


def _latency_s(free: Topology, uplink: Uplink, measured: Measurements) -> float:
    rest = [
        latency - free.node(one).latency_s - free.node(other).latency_s
        for (one, other), latency in latencies(measured.pairs).items()
        if {free.node(one).site, free.node(other).site} == set(uplink.between)
    ]
    return max(0.0, median(rest)) if rest else 0.0


def _crossed(topology: Topology, flow: Flow) -> list[Flow]:
    """The uplinks on a flow's way, each with the site that the flow leaves there."""
    here = topology.node(flow[0]).site
    crossed = []
    for uplink in topology.route(here, topology.node(flow[1]).site):
        crossed.append((uplink.name, here))
        here = uplink.between[1] if uplink.between[0] == here else uplink.between[0]
    return crossed


def is_connected(topology: Topology) -> bool:
    """Whether every site can be reached from every other."""
    sites = topology.sites
    reached = {sites[0]}
    while True:
        more = {
            site for uplink in topology.uplinks if reached & set(uplink.between) for site in uplink.between
        }
        if more <= reached:
            return len(reached) == len(sites)
        reached |= more


def _same(sites: _Sites, one: str, other: str) -> bool:
    return sites[one] == sites[other]


def _ordered(one: str, other: str) -> Flow:
    return (one, other) if one <= other else (other, one)
