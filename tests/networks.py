"""Networks that are known, and what a probe would measure there: for tests that find them again."""

from __future__ import annotations

import random
from collections.abc import Iterable

from echelon.plan.fair import fair_rates
from echelon.plan.measured import Flow, FlowsMeasured, PairMeasured
from echelon.plan.sites import SitesFound, find_sites, worthwhile_flows
from echelon.plan.topology import Node, Topology

GBIT = 125e6


def machine(name: str, site: str = "main", rate: float = GBIT, **more: float) -> Node:
    """A node with the same rate each way."""
    return Node(
        name=name,
        site=site,
        **{"up_bytes_per_s": rate, "down_bytes_per_s": rate, "latency_s": 1e-4} | more,  # type: ignore[arg-type]
    )


class Noisy:
    """What a probe would measure, with noise that a seed draws."""

    def __init__(self, topology: Topology, noise: float = 0.1, seed: int = 0) -> None:
        self.topology, self.noise = topology, noise
        self.draw = random.Random(seed)

    def off(self) -> float:
        return self.draw.uniform(1 - self.noise, 1 + self.noise)

    def pairs(self) -> list[PairMeasured]:
        nodes = self.topology.nodes
        found = [
            PairMeasured(
                sender=one.name,
                receiver=other.name,
                latency_s=self.topology.latency_s(one, other) * self.off(),
                bytes_per_s=self.topology.bytes_per_s(one, other) * self.off(),
            )
            for one in nodes
            for other in nodes
            if one is not other
        ]
        self.draw.shuffle(found)
        return found

    def flows(self, sets: Iterable[tuple[Flow, ...]]) -> list[FlowsMeasured]:
        return [
            FlowsMeasured(
                flows=one, bytes_per_s=tuple(rate * self.off() for rate in fair_rates(self.topology, one))
            )
            for one in sets
        ]

    def find(self, *, rounds: int = 1) -> SitesFound:
        """Pairs, then as many rounds of flows as are asked for."""
        names = [node.name for node in self.topology.nodes]
        pairs, flows = self.pairs(), []
        for _ in range(rounds):
            flows += self.flows(worthwhile_flows(names, pairs, flows))
        return find_sites(pairs, flows, nodes=[Node(name=name) for name in names])


def partition(topology: Topology) -> set[frozenset[str]]:
    """Who is with whom, whatever the sites are named."""
    return {frozenset(node.name for node in topology.nodes if node.site == site) for site in topology.sites}
