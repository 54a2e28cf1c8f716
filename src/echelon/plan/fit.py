"""Which links and uplinks explain what was measured, if it is given who is in which site?

A node's link is as fast as its best rates. An uplink is as fast as a pair of nodes is that gets less than
both their links allow, or as all flows together that lose something when they send at the same time. If
neither happened, it has at least the largest rate that was seen on it, and gets that one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from statistics import median

import numpy as np
import numpy.typing as npt

from echelon.plan.distances import best_rates, latencies, own_latencies
from echelon.plan.fair import fair_rates
from echelon.plan.measured import Flow, FlowsMeasured, PairMeasured
from echelon.plan.topology import Node, Topology, Uplink

LIMITED = 0.75  # a flow with less than this part of what its nodes' links allow is limited by an uplink
_CLEAR = 0.7  # another model must reduce the error to this part
_NOISE = 1.3
_MOST_SITES = 12  # with more, each pair of sites keeps an uplink of its own
_MOST_OFF = 4.0  # log 2; larger errors count as this one

Sites = Mapping[str, str]
_Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """All that a probe measured, and the nodes with what else is known about them."""

    nodes: tuple[Node, ...]
    pairs: tuple[PairMeasured, ...]
    flows: tuple[FlowsMeasured, ...] = ()

    @cached_property
    def alone(self) -> dict[Flow, float]:
        """The rate of each pair that was measured."""
        return {(pair.sender, pair.receiver): pair.bytes_per_s for pair in self.pairs}

    @cached_property
    def latencies(self) -> dict[Flow, float]:
        """One way between each two nodes."""
        return latencies(self.pairs)

    @cached_property
    def links(self) -> tuple[dict[str, float], dict[str, float]]:
        """Each node's own link, up and down."""
        return best_rates(self.alone, 0), best_rates(self.alone, 1)


def fit(measured: Measurements, sites: Sites) -> Topology:
    """The nodes and uplinks; sites between which nothing was measured have none."""
    evidence = _Evidence(measured, sites)
    order = evidence.bare.sites
    between = [pair for pair in combinations(order, 2) if evidence.measured_between(*pair)]
    best = evidence.with_uplinks(between)
    if not 2 < len(order) <= _MOST_SITES or not measured.flows or not is_connected(best):
        return best
    # A site may be reached through another one. Only flows at the same time can tell.
    least = evidence.error(best)
    while True:
        tried = []
        for left in between:
            topology = evidence.with_uplinks([pair for pair in between if pair != left])
            if is_connected(topology):
                tried.append((evidence.error(topology), left, topology))
        found = min(tried, key=lambda one: one[0], default=None)
        if found is None or found[0] > _CLEAR * least:
            return best
        least, best = found[0], found[2]
        between.remove(found[1])


def error(topology: Topology, measured: Measurements) -> float:
    """How far predicted rates are from measured ones: mean square of log 2, of pairs and of flows."""
    return _Evidence(measured, {node.name: node.site for node in topology.nodes}).error(topology)


def is_connected(topology: Topology) -> bool:
    """Whether every site can be reached from every other."""
    reached = {topology.sites[0]}
    while True:
        more = {site for line in topology.uplinks if reached & set(line.between) for site in line.between}
        if more <= reached:
            return len(reached) == len(topology.sites)
        reached |= more


@dataclass(slots=True)
class _Load:
    """What was seen on one direction of an uplink.

    single, limited  rates of flows alone, and of those that got less than their nodes' links allow
    sums, full       sums of flows at the same time, and of those that together lost something
    """

    single: list[float] = field(default_factory=list)
    limited: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    full: list[float] = field(default_factory=list)

    def rate(self) -> tuple[float, bool]:
        """Bytes per second, and whether it is the line's limit or only the largest that was seen."""
        some = 2 * len(self.limited) > len(self.single)
        limit = max(np.mean(self.limited) if some else 0.0, median(self.full) if self.full else 0.0)
        seen = max([*self.sums, *self.single], default=0.0)
        # More was seen than the limit: single flows are limited each on its own, or on another uplink.
        return (float(limit), True) if limit and seen < _NOISE * limit else (seen, False)


class _Evidence:
    """The measurements by site, in arrays, because many sets of uplinks are compared with them."""

    def __init__(self, measured: Measurements, sites: Sites) -> None:
        self.measured = measured
        self.bare = Topology(nodes=_nodes(measured, sites), known="measured by a probe")
        self.place = {site: at for at, site in enumerate(self.bare.sites)}
        up, down = measured.links
        flows = list(measured.alone)
        self.rates: _Vector = np.array(list(measured.alone.values()))
        self.possible: _Vector = np.array([min(up[sender], down[receiver]) for sender, receiver in flows])
        self.start = np.array([self.place[sites[sender]] for sender, _ in flows], dtype=np.int64)
        self.stop = np.array([self.place[sites[receiver]] for _, receiver in flows], dtype=np.int64)
        self.late = self._late()

    def measured_between(self, one: str, other: str) -> bool:
        """Whether any pair was measured between two sites."""
        return frozenset((one, other)) in self.late

    def with_uplinks(self, between: Sequence[Flow]) -> Topology:
        """The uplinks that are named, each with its rate and latency."""
        free = replace(self.bare, uplinks=tuple(Uplink(between=pair) for pair in between))
        if not is_connected(free):
            return free
        loads = self._loads(free)
        uplinks = []
        for uplink in free.uplinks:
            ways = [loads[uplink.name, site].rate() for site in uplink.between]
            limits = [rate for rate, is_limit in ways if is_limit]
            rate = min(limits) if limits else max(rate for rate, _ in ways)
            late = max(0.0, self.late[frozenset(uplink.between)])
            uplinks.append(replace(uplink, bytes_per_s=rate or math.inf, latency_s=late))
        return replace(free, uplinks=tuple(uplinks))

    def error(self, topology: Topology) -> float:
        """Mean square of log 2 of measured over predicted rates, of pairs alone and of flows together."""
        sites = list(self.place)
        lines = np.array([[_slowest(topology, one, other) for other in sites] for one in sites])
        total = 0.0
        if len(self.rates):
            expected = np.minimum(self.possible, lines[self.start, self.stop])
            total = _mean_square(self.rates, expected)
        if self.measured.flows:
            rates = [rate for one in self.measured.flows for rate in one.bytes_per_s]
            fair = [rate for one in self.measured.flows for rate in fair_rates(topology, one.flows)]
            total += _mean_square(np.array(rates), np.array(fair))
        return total

    def _loads(self, free: Topology) -> dict[Flow, _Load]:
        """By the uplink's name and the site that the flows leave."""
        found = {}
        for uplink in free.uplinks:
            for start, stop in (uplink.between, uplink.between[::-1]):
                here = (self.start == self.place[start]) & (self.stop == self.place[stop])
                single, possible = self.rates[here], self.possible[here]
                limited = single[single < LIMITED * possible]
                found[uplink.name, start] = _Load(single.tolist(), limited.tolist())
        for one in self.measured.flows:
            sums: dict[Flow, tuple[float, float]] = {}
            for flow, rate, most in zip(
                one.flows, one.bytes_per_s, fair_rates(free, one.flows), strict=True
            ):
                for line in _crossed(free, flow):
                    before = sums.get(line, (0.0, 0.0))
                    sums[line] = (before[0] + rate, before[1] + most)
            for line, (rate, most) in sums.items():
                found[line].sums.append(rate)
                if rate < LIMITED * most:
                    found[line].full.append(rate)
        return found

    def _late(self) -> dict[frozenset[str], float]:
        """The latency between sites that no node's own link explains."""
        found: dict[frozenset[str], list[float]] = {}
        for pair, latency in self.measured.latencies.items():
            one, other = (self.bare.node(name) for name in pair)
            rest = latency - one.latency_s - other.latency_s
            found.setdefault(frozenset((one.site, other.site)), []).append(rest)
        return {pair: median(rest) for pair, rest in found.items()}


def _nodes(measured: Measurements, sites: Sites) -> tuple[Node, ...]:
    up, down = measured.links
    inside = {pair: late for pair, late in measured.latencies.items() if sites[pair[0]] == sites[pair[1]]}
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


def _mean_square(rates: _Vector, expected: _Vector) -> float:
    off = np.minimum(np.abs(np.log2(rates / np.maximum(expected, 1e-9))), _MOST_OFF)
    return float(np.mean(off**2))


def _slowest(topology: Topology, one: str, other: str) -> float:
    return min((uplink.bytes_per_s for uplink in topology.route(one, other)), default=math.inf)


def _crossed(topology: Topology, flow: Flow) -> list[Flow]:
    """The uplinks on a flow's way, each with the site that the flow leaves there."""
    here = topology.node(flow[0]).site
    crossed = []
    for uplink in topology.route(here, topology.node(flow[1]).site):
        crossed.append((uplink.name, here))
        here = uplink.between[1] if uplink.between[0] == here else uplink.between[0]
    return crossed
