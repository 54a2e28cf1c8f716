"""How long do flows take that share links? Bytes and seconds on every link, by proportional sharing.

Flows of a phase go on at the same time, so a phase takes as long as its busiest link. Links are the nodes'
own, each way, and the uplinks, each way. Workers of one node exchange bytes through memory.

Rates are those of payload: a link of 1 Gb/s moves about 119 MB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from echelon.comm.schedule.collectives.auto import AutoCollective
from echelon.comm.schedule.cost import LinkCost, choose
from echelon.config.call import parse_call
from echelon.plan.predict.engine_costs import EngineCosts
from echelon.plan.predict.flows import Floats, FlowPhase, Ints, Phases, on_members, phases_of
from echelon.plan.topology import Topology

EXACT = 64  # beyond so many workers, `auto` is asked for the next lower power of two: schedules take long
_STEP_S = 1e-4  # what the engine measures as latency on a fast link: software


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """What a collective costs per byte of its buffer; arrays are by worker or by link.

    steps            messages that follow each other
    latency_s        of the wires, in all steps
    s_per_byte       on the busiest links of all steps
    link_fractions   bytes through each link
    link_s_per_byte  seconds on each link
    messages         sent and received, by worker
    moved_s          CPU seconds to send and receive them, by worker
    added_fractions  bytes added, by worker
    """

    steps: int
    latency_s: float
    s_per_byte: float
    link_fractions: Floats
    link_s_per_byte: Floats
    messages: Floats
    moved_s: Floats
    added_fractions: Floats


class SharedLinks:
    """The links between some nodes of a topology, by rank. Servers follow, on the first nodes."""

    def __init__(
        self,
        topology: Topology,
        names: Sequence[str],
        engine: EngineCosts,
        *,
        servers: int = 0,
        order: Sequence[int] = (),
    ) -> None:
        """`order` lists the ranks in the order in which collectives take them for neighbours."""
        self.nodes = [topology.node(name) for name in names]
        self.size = len(names)
        self._engine = engine
        self.server_nodes = list(names[:servers])
        self._topology = topology
        self._order = tuple(order)
        places = list(range(self.size)) + list(range(servers))
        index = {name: at for at, name in enumerate(dict.fromkeys(names))}
        held = list(index)
        self._node_of = np.array([index[names[place]] for place in places])
        site_index = {site: at for at, site in enumerate(topology.sites)}
        self._site_of = np.array([site_index[self.nodes[place].site] for place in places])
        self._sites = len(site_index)
        unique = [topology.node(name) for name in held]
        self.node_names = held
        self.count = len(held)
        uplinks = topology.uplinks
        self.uplinks = uplinks
        self.rates = np.array(
            [
                *(node.up_bytes_per_s for node in unique),
                *(node.down_bytes_per_s for node in unique),
                *(uplink.bytes_per_s for uplink in uplinks for _ in range(2)),
            ],
            dtype=float,
        )
        self._latency_of = np.array([node.latency_s for node in unique])
        self._routes, self._route_latency = self._find_routes(topology)
        self._route_rate = np.full(self._route_latency.shape, np.inf)
        for (one, other), path in self._routes.items():
            self._route_rate[one, other] = min((float(self.rates[link]) for link in path), default=np.inf)
        self._costs: dict[str, CollectiveCost] = {}
        self.used: dict[str, None] = {}  # the collectives that were asked for, with what `auto` became

    def _find_routes(self, topology: Topology) -> tuple[dict[tuple[int, int], list[int]], Floats]:
        """For each pair of sites, the indices of the uplinks' directions, and the latency."""
        sites = topology.sites
        at = {id(uplink): index for index, uplink in enumerate(topology.uplinks)}
        used = sorted(set(self._site_of.tolist()))
        routes: dict[tuple[int, int], list[int]] = {}
        latency = np.zeros((len(sites), len(sites)))
        for one in used:
            for other in used:
                if one == other:
                    continue
                here = sites[one]
                path = []
                for uplink in topology.route(sites[one], sites[other]):
                    forward = uplink.between[0] == here
                    path.append(2 * self.count + 2 * at[id(uplink)] + (0 if forward else 1))
                    here = uplink.between[1] if forward else uplink.between[0]
                    latency[one, other] += uplink.latency_s
                routes[one, other] = path
        return routes, latency

    def cost(self, collective: str, length_bytes: float) -> CollectiveCost:
        """Of a collective, as on the command line; `auto` chooses by the length."""
        if parse_call(collective).name == AutoCollective.name:
            collective = self.chosen(int(length_bytes))
        self.used[collective] = None
        if collective not in self._costs:
            phases = phases_of(collective, self.size)
            self._costs[collective] = self.of(on_members(phases, self._order) if self._order else phases)
        return self._costs[collective]

    def chosen(self, length_bytes: int) -> str:
        """The collective that `auto` takes for this length."""
        size = self.size if self.size <= EXACT else 1 << (self.size.bit_length() - 1)
        return choose(size, length_bytes, AutoCollective.measured(self.slowest).link, 1 / 4e9)[0]

    @cached_property
    def slowest(self) -> LinkCost:
        """As the engine measures it: neighbours send at once, so flows share links."""
        senders = np.arange(self.size)
        receivers = np.roll(senders, -1)
        slow_s = _STEP_S
        rate = np.inf
        if self.size > 1:
            loads = self._loads(senders, receivers, np.ones(self.size))
            with np.errstate(invalid="ignore", divide="ignore"):
                seconds = np.where(loads > 0, loads / self.rates, 0.0)
            rate = 1 / max(float(seconds.max()), 1e-12)
            slow_s += float(self._latencies(senders, receivers).max())
        return LinkCost(latency_s=slow_s, seconds_per_byte=1 / rate)

    def _loads(self, senders: Ints, receivers: Ints, amounts: Floats) -> Floats:
        """What goes through each link."""
        loads = np.zeros(len(self.rates))
        from_node, to_node = self._node_of[senders], self._node_of[receivers]
        outside = from_node != to_node
        moved = np.where(outside, amounts, 0.0)
        loads[: self.count] = np.bincount(from_node, moved, self.count)
        loads[self.count : 2 * self.count] = np.bincount(to_node, moved, self.count)
        if self.uplinks:
            sites = self._sites
            pair = self._site_of[senders] * sites + self._site_of[receivers]
            between = np.bincount(pair, moved, sites * sites)
            for index in np.nonzero(between)[0]:
                for link in self._routes.get((int(index) // sites, int(index) % sites), ()):
                    loads[link] += between[index]
        return loads

    def _latencies(self, senders: Ints, receivers: Ints) -> Floats:
        from_node, to_node = self._node_of[senders], self._node_of[receivers]
        own = self._latency_of[from_node] + self._latency_of[to_node]
        wires = own + self._route_latency[self._site_of[senders], self._site_of[receivers]]
        return np.where(from_node != to_node, wires, 0.0)

    def of(self, phases: Phases) -> CollectiveCost:
        """The cost of some phases."""
        steps, latency_s, s_per_byte = 0, 0.0, 0.0
        links = np.zeros(len(self.rates))
        busy = np.zeros(len(self.rates))
        messages, moved, added = np.zeros(self.size), np.zeros(self.size), np.zeros(self.size)
        for phase in phases:
            loads = self._loads(phase.senders, phase.receivers, phase.fractions)
            seconds = np.where(loads > 0, loads / self.rates, 0.0)
            inside = self._inside_s(phase)
            steps += phase.repeats
            latency_s += phase.repeats * float(
                self._latencies(phase.senders, phase.receivers).max(initial=0)
            )
            s_per_byte += phase.repeats * max(float(seconds.max(initial=0.0)), inside)
            links += phase.repeats * loads
            busy += phase.repeats * seconds
            self._count(phase, messages, moved, added)
        return CollectiveCost(
            steps=steps,
            latency_s=latency_s,
            s_per_byte=s_per_byte,
            link_fractions=links,
            link_s_per_byte=busy,
            messages=messages,
            moved_s=moved,
            added_fractions=added,
        )

    def _inside_s(self, phase: FlowPhase) -> float:
        """Seconds per byte of what workers of one node exchange."""
        same = self._node_of[phase.senders] == self._node_of[phase.receivers]
        if not same.any():
            return 0.0
        loads = np.bincount(self._node_of[phase.senders[same]], phase.fractions[same], self.count)
        return float(loads.max()) / self._engine.memory_bytes_per_s

    def _count(self, phase: FlowPhase, messages: Floats, moved: Floats, added: Floats) -> None:
        """A server's work counts for the worker of its node."""
        senders, receivers = phase.senders % self.size, phase.receivers % self.size
        fractions = phase.fractions * phase.repeats
        outside = self._node_of[phase.senders] != self._node_of[phase.receivers]
        amounts = np.where(outside, fractions * self._byte_s(phase), 0.0)
        for ends in (senders, receivers):
            messages += np.bincount(ends, minlength=self.size) * float(phase.repeats)
            moved += np.bincount(ends, amounts, self.size)
        if phase.adds:
            added += np.bincount(receivers, fractions, self.size)

    def _byte_s(self, phase: FlowPhase) -> Floats:
        """CPU seconds per byte at each end of the flows: by the slowest link on their ways."""
        senders, receivers = phase.senders, phase.receivers
        up = self.rates[: self.count][self._node_of[senders]]
        down = self.rates[self.count : 2 * self.count][self._node_of[receivers]]
        between = self._route_rate[self._site_of[senders], self._site_of[receivers]]
        return self._engine.byte_costs_s(np.minimum(np.minimum(up, down), between))

    def named_bytes(self, through: Floats) -> dict[str, float]:
        """Bytes by the names of nodes and uplinks, both ways together."""
        count = self.count
        named = {name: float(through[at] + through[count + at]) for at, name in enumerate(self.node_names)}
        for at, uplink in enumerate(self.uplinks):
            first = 2 * count + 2 * at
            named[uplink.name] = float(through[first] + through[first + 1])
        return named

    def link_name(self, link: int) -> str:
        """As a person would call it."""
        if link < 2 * self.count:
            return f"the link of {self.node_names[link % self.count]}"
        return f"the uplink {self.uplinks[(link - 2 * self.count) // 2].name}"
