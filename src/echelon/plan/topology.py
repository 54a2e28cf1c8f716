"""What machines and links there are, as a planner sees them: measured or told, never guessed.

Every node has a link to the switch of its site, and sites are joined by uplinks. What travels between two
nodes takes the sender's link, the uplinks of the shortest path, and the receiver's link; flows on the same
link share its rate. A lab file describes the same thing, and `echelon probe` finds it by measuring.

On disk it is TOML that a person can read and edit, with units (`1gbit`, `5ms`, `16GiB`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine that a worker can run on.

    speed               how fast it computes, relative to the topology's reference (`Topology.reference_s`);
                        a CPU quota counts: 0.25 takes four times as long
    cores               the CPU time that it may use, in cores; less than 1 with a quota
    memory_bytes        what a worker may use
    up_, down_bytes_per_s, latency_s
                        its link to the switch of its site, each way; the latency is one way
    reduce_bytes_per_s  how fast it adds received bytes
    cache_bytes         the second-level cache, 0 if unknown
    clock_offset_s      its clock minus the first node's
    """

    name: str
    site: str = "main"
    speed: float = 1.0
    cores: float = 1.0
    memory_bytes: float = math.inf
    up_bytes_per_s: float = math.inf
    down_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    reduce_bytes_per_s: float = 4e9
    cache_bytes: int = 0
    clock_offset_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Uplink:
    """The line between the switches of two sites; its rate is for each direction."""

    between: tuple[str, str]
    bytes_per_s: float = math.inf
    latency_s: float = 0.0

    @property
    def name(self) -> str:
        """As a lab names it: `east/west`."""
        return "/".join(self.between)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """All nodes and uplinks. `known` says how it is known, such as `told by lab two-sites`.

    reference_s  what the probe's fixed small step takes on a node with speed 1; 0 if unknown. By it, what
                 was measured on another machine is made comparable
    """

    nodes: tuple[Node, ...]
    uplinks: tuple[Uplink, ...] = ()
    known: str = ""
    reference_s: float = 0.0

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites, in order of appearance."""
        return tuple(dict.fromkeys(node.site for node in self.nodes))

    def node(self, name: str) -> Node:
        """The node of that name."""
        return self._by_name[name]

    def route(self, one: str, other: str) -> tuple[Uplink, ...]:
        """The uplinks from one site to another: the fewest; empty within a site."""
        return self._routes[one, other]

    def bytes_per_s(self, sender: Node, receiver: Node) -> float:
        """The rate from one node to another, if nobody else sends."""
        if sender.name == receiver.name:
            return math.inf
        between = [uplink.bytes_per_s for uplink in self.route(sender.site, receiver.site)]
        return min(sender.up_bytes_per_s, receiver.down_bytes_per_s, *between, math.inf)

    def latency_s(self, sender: Node, receiver: Node) -> float:
        """One way from one node to another."""
        if sender.name == receiver.name:
            return 0.0
        between = sum(uplink.latency_s for uplink in self.route(sender.site, receiver.site))
        return sender.latency_s + between + receiver.latency_s

    @cached_property
    def _by_name(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def _routes(self) -> Mapping[tuple[str, str], tuple[Uplink, ...]]:
        return {
            (start, site): path
            for start in self.sites
            for site, path in _paths(start, self.sites, self.uplinks).items()
        }


def _paths(start: str, sites: Sequence[str], uplinks: Sequence[Uplink]) -> dict[str, tuple[Uplink, ...]]:
    """The uplinks to every site that can be reached; among paths of equal length the first in the list."""
    found: dict[str, tuple[Uplink, ...]] = {start: ()}
    waiting = deque([start])
    while waiting:
        here = waiting.popleft()
        for uplink in uplinks:
            if here in uplink.between:
                there = uplink.between[1] if uplink.between[0] == here else uplink.between[0]
                if there not in found and there in sites:
                    found[there] = (*found[here], uplink)
                    waiting.append(there)
    return found
