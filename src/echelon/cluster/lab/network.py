"""Builds the network of a lab: namespaces joined by shaped veth pairs and one bridge per site.

    node a (namespace)         switch (one namespace per lab)           node b (namespace)
    eth0 ─ tbf ══════════ tbf ─ p0 ─ br0 ─ u0a ══ tbf ══ u0b ─ br1 ─ p1 ─ tbf ══════════ tbf ─ eth0

Each end of a link shapes what it sends, so a link has its rate in both directions at once. The bridges and
nodes get static forwarding and neighbour entries: nothing is learnt or flooded across uplinks, so sites may
form a ring, and a cut link drops packets silently instead of answering "no route".

The functions that make the commands are pure; `Network` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from echelon.cluster.lab.commands import batch, run
from echelon.cluster.lab.names import INTERFACE, Names, hardware_address
from echelon.cluster.lab.paths import next_uplinks
from echelon.cluster.lab.spec import LabSpec

# A burst of 1 ms at line rate reaches the rate (1 Gb/s: measured 956 Mb/s of TCP payload) and is still
# short for a slow link; it must hold at least a few packets.
_BURST_S = 1e-3
_LEAST_BURST_BYTES = 16 * 1024
# A queue of 100 ms, like the buffers of ordinary switches and routers; at least one large TCP segment.
_QUEUE_S = 0.1
_LEAST_QUEUE_BYTES = 64 * 1024
_NETEM_PACKETS = 20_000
# The rate of a link without one while its rate varies: about what a namespace's links reach.
_UNLIMITED_BYTES_PER_S = 1.25e9


class Send(Protocol):
    """Carries out commands of tc or bridge in a namespace."""

    def __call__(self, tool_name: str, lines: list[str], *, doing: str, namespace: str) -> None:
        """Carry out the commands, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCondition:
    """How a link should behave now."""

    rate_bytes_per_s: float | None
    jitter_s: float = 0.0
    loss: float = 0.0
    is_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LabLink:
    """One link: its latency and condition in the file, its two ends, and the switch ports that cut it."""

    latency_s: float
    condition: LinkCondition
    ends: tuple[tuple[str, str], tuple[str, str]]
    ports: tuple[str, ...]


class Network:
    """The network of one lab. It holds no state besides the spec: the kernel keeps the rest."""

    def __init__(self, spec: LabSpec, names: Names, *, netem: bool) -> None:
        self.spec = spec
        self.names = names
        self.netem = netem
        self.send: Send = batch
        """Carries out changes of links."""

    def reset_sender(self) -> None:
        """Carry out changes one by one again."""
        self.send = batch

    def build(self) -> None:
        """Build everything. On failure the caller removes what exists."""
        spec, names = self.spec, self.names
        for name in (names.switch, *(names.namespace(node.name) for node in spec.nodes)):
            run(["ip", "netns", "add", name], doing="make a network namespace")
        batch("ip", cable_lines(spec, names), doing="make the links")
        batch("ip", switch_lines(spec), doing="make the bridges", namespace=names.switch)
        batch("bridge", forwarding_lines(spec), doing="fill the bridges", namespace=names.switch)
        for index, node in enumerate(spec.nodes):
            lines = node_lines(spec, names, index)
            batch("ip", lines, doing=f"set up node {node.name}", namespace=names.namespace(node.name))
        for name in spec.link_names:
            link = self.link(name)
            needs_netem = link.latency_s or link.condition.jitter_s or link.condition.loss
            if link.condition.rate_bytes_per_s is not None or (needs_netem and self.netem):
                self.shape(name, link.condition)

    def link(self, name: str) -> LabLink:
        """The uplink of that name ('east/west'), or the node's own link."""
        for number, uplink in enumerate(self.spec.uplinks):
            if uplink.name == name:
                ports = (f"u{number}a", f"u{number}b")
                return LabLink(
                    latency_s=uplink.latency_s,
                    condition=LinkCondition(
                        rate_bytes_per_s=uplink.rate_bytes_per_s, jitter_s=uplink.jitter_s, loss=uplink.loss
                    ),
                    ends=((self.names.switch, ports[0]), (self.names.switch, ports[1])),
                    ports=ports,
                )
        index = self.spec.index_of(name)
        node = self.spec.nodes[index]
        return LabLink(
            latency_s=node.latency_s,
            condition=LinkCondition(
                rate_bytes_per_s=node.link_bytes_per_s, jitter_s=node.jitter_s, loss=node.loss
            ),
            ends=((self.names.namespace(name), INTERFACE), (self.names.switch, f"p{index}")),
            ports=(f"p{index}",),
        )

    def shape(self, name: str, condition: LinkCondition) -> None:
        """Give a link this rate and, with netem, this jitter and loss, in both directions, now."""
        link = self.link(name)
        for namespace, device in link.ends:
            if self.netem:
                lines = shaping_lines(
                    device, condition.rate_bytes_per_s, link.latency_s, condition.jitter_s, condition.loss
                )
            else:
                lines = shaping_lines(device, condition.rate_bytes_per_s, 0.0)
            self.send("tc", lines, doing=f"shape the link {name}", namespace=namespace)

    def reshape(self, name: str, bytes_per_s: float | None, factor: float) -> None:
        """Let a link have a fraction of its rate for a while; its queue keeps its size."""
        for namespace, device in self.link(name).ends:
            line = rate_line(device, bytes_per_s or _UNLIMITED_BYTES_PER_S, factor=factor)
            self.send("tc", [line], doing=f"shape the link {name}", namespace=namespace)

    def cut(self, name: str) -> None:
        """Silently drop all traffic on a link: no carrier is lost, no connection is reset."""
        self._set_ports(name, "0")

    def mend(self, name: str) -> None:
        """Let a cut link carry traffic again."""
        self._set_ports(name, "3")

    def _set_ports(self, name: str, state: str) -> None:
        lines = [f"link set dev {port} state {state}" for port in self.link(name).ports]
        self.send("bridge", lines, doing=f"change the link {name}", namespace=self.names.switch)


def cable_lines(spec: LabSpec, names: Names) -> list[str]:
    """One veth pair per node: its interface, and a port in the switch."""
    return [
        f"link add {INTERFACE} netns {names.namespace(node.name)} address {hardware_address(index)}"
        f" type veth peer name p{index} netns {names.switch}"
        for index, node in enumerate(spec.nodes)
    ]


def switch_lines(spec: LabSpec) -> list[str]:
    """One bridge per site with its nodes' ports, and the uplinks between the bridges."""
    bridges = {site: f"br{number}" for number, site in enumerate(spec.sites)}
    lines = ["link set lo up"]
    for bridge in bridges.values():
        lines += [f"link add {bridge} type bridge mcast_snooping 0", _up(bridge)]
    for index, node in enumerate(spec.nodes):
        lines.append(_up(f"p{index}", f"master {bridges[node.site]} "))
    for number, uplink in enumerate(spec.uplinks):
        ends = (f"u{number}a", f"u{number}b")
        lines.append(f"link add {ends[0]} type veth peer name {ends[1]}")
        for end, site in zip(ends, uplink.between, strict=True):
            lines.append(_up(end, f"master {bridges[site]} "))
            # Only known addresses may pass, so that nothing circles when uplinks form a ring.
            lines.append(
                f"link set {end} type bridge_slave learning off flood off mcast_flood off bcast_flood off"
            )
    return lines


def _up(device: str, also: str = "") -> str:
    # No IPv6 link-local address, so that there is no duplicate-address traffic on emulated links.
    return f"link set {device} {also}addrgenmode none up"


def forwarding_lines(spec: LabSpec) -> list[str]:
    """The port of each site's bridge that leads to each node."""
    uplinks = [uplink.between for uplink in spec.uplinks]
    next_uplink = next_uplinks(spec.sites, uplinks)
    lines = []
    for site in spec.sites:
        for index, node in enumerate(spec.nodes):
            if node.site == site:
                port = f"p{index}"
            else:
                number = next_uplink[site, node.site]
                port = f"u{number}{'a' if uplinks[number][0] == site else 'b'}"
            lines.append(f"fdb add {hardware_address(index)} dev {port} master static")
    return lines


def node_lines(spec: LabSpec, names: Names, index: int) -> list[str]:
    """A node's interface, address and neighbours."""
    lines = [
        "link set lo up",
        _up(INTERFACE),
        f"address add {names.address(index)}/16 brd + dev {INTERFACE}",
    ]
    lines += [
        f"neighbour replace {names.address(other)} lladdr {hardware_address(other)}"
        f" dev {INTERFACE} nud permanent"
        for other in range(len(spec.nodes))
        if other != index
    ]
    return lines


def shaping_lines(
    device: str, bytes_per_s: float | None, latency_s: float, jitter_s: float = 0.0, loss: float = 0.0
) -> list[str]:
    """The queueing disciplines of one end of a link; they replace existing ones."""
    lines = []
    parent = "root"
    if latency_s > 0 or jitter_s > 0 or loss > 0:
        words = [f"delay {_us(latency_s)}" + (f" {_us(jitter_s)}" if jitter_s > 0 else "")]
        words += [f"loss {loss * 100:.6g}%"] if loss > 0 else []
        lines.append(
            f"qdisc replace dev {device} root handle 1: netem {' '.join(words)} limit {_NETEM_PACKETS}"
        )
        parent = "parent 1:1"
    if bytes_per_s is not None:
        lines.append(rate_line(device, bytes_per_s, parent=parent))
    return lines or [f"qdisc replace dev {device} root noqueue"]


def rate_line(device: str, bytes_per_s: float, *, factor: float = 1.0, parent: str = "root") -> str:
    """The discipline that gives one end of a link a fraction of a rate; burst and queue are the rate's."""
    burst = max(round(bytes_per_s * _BURST_S), _LEAST_BURST_BYTES)
    limit = max(round(bytes_per_s * _QUEUE_S), _LEAST_QUEUE_BYTES) + burst
    return (
        f"qdisc replace dev {device} {parent} handle 2:"
        f" tbf rate {round(bytes_per_s * factor * 8)}bit burst {burst} limit {limit}"
    )


def _us(seconds: float) -> str:
    return f"{round(seconds * 1e6)}us"
