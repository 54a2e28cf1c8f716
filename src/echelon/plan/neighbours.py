"""In which order are workers neighbours? Those of one machine, then those of one site, then the others.

A layout's first dimension goes over neighbours, its last one between sites. The order is that of the
plan's groups, if it has some, or of the sites that measured links show; ranks ascend within a group, and
groups are in the order of their first ranks. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echelon.plan.arrange import Pair, topology_of_links
from echelon.plan.groups import Groups


def neighbouring_groups(
    machines: Sequence[Sequence[int]],
    latency_s: Mapping[Pair, float],
    bytes_per_s: Mapping[Pair, float],
    groups: Groups = (),
) -> tuple[tuple[int, ...], ...]:
    """The workers of each site, machine by machine; without several machines, all of them."""
    if groups:
        homes = {rank: str(at) for at, group in enumerate(groups) for rank in group}
    elif len(machines) > 1 and bytes_per_s:
        topology = topology_of_links(latency_s, bytes_per_s, machines)
        homes = {rank: topology.nodes[at].site for at, ranks in enumerate(machines) for rank in ranks}
    else:
        homes = {}
    found: dict[str, list[int]] = {}
    for ranks in sorted(machines, key=min):
        for rank in sorted(ranks):
            found.setdefault(homes.get(rank, ""), []).append(rank)
    return tuple(sorted((tuple(ranks) for ranks in found.values()), key=min))
