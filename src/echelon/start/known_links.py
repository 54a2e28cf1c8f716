"""What did an earlier probe find about these machines? From the cache; nothing is measured, no torch.

With another launcher, other hosts, another lab or another machine here, it is another cluster.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Protocol

from echelon.cluster import probe_cache
from echelon.cluster.lab.spec import read_lab
from echelon.cluster.probe import fingerprint
from echelon.errors import ConfigError
from echelon.plan.cluster_file import read_cluster
from echelon.plan.topology import Topology


class MachinesNamed(Protocol):
    """Which machines a probe or a run is for; both have these settings."""

    @property
    def on(self) -> str:
        """What starts the workers."""

    @property
    def hosts(self) -> str | None:
        """The machines, as the user named them."""

    @property
    def lab(self) -> str | None:
        """The emulated cluster."""


def cached_topology(asked: MachinesNamed, nodes: Sequence[str]) -> Topology | None:
    """What a probe of these nodes, by rank, found within a day; None if it has to be measured."""
    entry = probe_cache.cached(cluster_key(asked, nodes), within_s=probe_cache.LINKS_AGE_S)
    if entry is None:
        return None
    try:
        return read_cluster(entry.text, "cache").topology
    except ConfigError:
        return None


def cluster_key(asked: MachinesNamed, nodes: Sequence[str]) -> str:
    """What a probe's result depends on."""
    return f"cluster of {', '.join(nodes)}; {place_of(asked)}; from {platform.node()}, {fingerprint()}"


def place_of(asked: MachinesNamed) -> str:
    """What links depend on besides the nodes."""
    if asked.lab:
        spec = read_lab(asked.lab)
        return f"lab {spec.nodes} {spec.uplinks}"
    return f"{asked.on} {asked.hosts or ''}"
