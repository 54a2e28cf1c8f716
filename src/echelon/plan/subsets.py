"""Which sets of nodes are worth trying? All of them for a few nodes; else whole groups, then single nodes.

Nodes are alike if they are at the same site and within a factor of about 1.4 in speed and 2 in rate; of
nodes that are alike the more useful come first. A search starts from sets that differ in whole groups and
in size, and goes on with those that differ by one group or one node from the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations

from echelon.plan.job import JobProfile
from echelon.plan.topology import Node

Members = tuple[Node, ...]
_CLASSES_COMBINED = 5  # of so many groups every combination is tried
_GROWTH = 1.5


class NodeSets:
    """Sets of the usable nodes, each in the order of the topology."""

    def __init__(self, nodes: Sequence[Node], job: JobProfile, most_workers: int) -> None:
        self.nodes = tuple(nodes)
        self.most = min(most_workers, job.batch, len(nodes))
        share = job.batch / max(1, len(nodes))
        self._cost_s = {node.name: job.cost_on(node).at(share) + _link_s(node, job) for node in nodes}
        self._position = {node.name: index for index, node in enumerate(nodes)}
        self.ordered = tuple(sorted(nodes, key=self._usefulness))
        self.groups = self._alike(job)
        self._group_of = {node.name: group for group in self.groups for node in group}

    def every(self) -> Iterator[Members]:
        """All sets, the smaller ones first."""
        for size in range(1, self.most + 1):
            yield from combinations(self.nodes, size)

    def first(self) -> list[Members]:
        """Where a search of many nodes starts: sets of whole groups, and of the most useful nodes."""
        sets = [self.ordered, *_growing(self.ordered)]
        for site in dict.fromkeys(node.site for node in self.nodes):
            at_site = tuple(node for node in self.ordered if node.site == site)
            sets += [at_site, *_growing(at_site)]
        sets += [sum(groups, ()) for groups in accumulate([[g] for g in self.groups], _join)]
        if len(self.groups) <= _CLASSES_COMBINED:
            for size in range(1, len(self.groups)):
                sets += [sum(some, ()) for some in combinations(self.groups, size)]
        else:
            sets += [sum((g for g in self.groups if g is not out), ()) for out in self.groups]
        return self._distinct(sets)

    def beside(self, members: Members) -> list[Members]:
        """The sets that differ from `members` by a group, or by one node of a group."""
        chosen = {node.name for node in members}
        sets: list[Members] = []
        for group in self.groups:
            inside = tuple(node for node in group if node.name in chosen)
            outside = tuple(node for node in group if node.name not in chosen)
            if outside:
                sets += [(*members, outside[0]), (*members, *outside[: (len(outside) + 1) // 2])]
                sets.append((*members, *outside))
            if inside:
                sets += [_without(members, inside[-1:]), _without(members, inside[len(inside) // 2 :])]
                sets.append(_without(members, inside))
        return [other for other in self._distinct(sets) if {node.name for node in other} != chosen]

    def group_of(self, node: Node) -> Members:
        """The nodes that are like this one."""
        return self._group_of[node.name]

    def _distinct(self, sets: Sequence[Members]) -> list[Members]:
        """In the order of the topology, without doubles, and no larger than is allowed."""
        found: dict[tuple[int, ...], None] = {}
        for members in sets:
            limited = members
            if len(members) > self.most:
                limited = tuple(sorted(members, key=self._usefulness))[: self.most]
            if limited:
                found[tuple(sorted(self._position[node.name] for node in limited))] = None
        return [tuple(self.nodes[index] for index in indices) for indices in found]

    def _alike(self, job: JobProfile) -> list[Members]:
        groups: dict[tuple[object, ...], list[Node]] = {}
        for node in self.ordered:
            rate = min(node.up_bytes_per_s, node.down_bytes_per_s)
            kind = (node.site, _half_log2(job.cost_on(node).at(1)), _half_log2(rate) // 2)
            groups.setdefault(kind, []).append(node)
        return [tuple(group) for group in groups.values()]

    def _usefulness(self, node: Node) -> tuple[float, int]:
        return self._cost_s[node.name], self._position[node.name]


def _link_s(node: Node, job: JobProfile) -> float:
    rate = min(node.up_bytes_per_s, node.down_bytes_per_s)
    return 2 * job.gradient_bytes / rate + node.latency_s if rate > 0 else math.inf


def _half_log2(value: float) -> int:
    """Equal for values within a factor of about 1.4."""
    return round(2 * math.log2(value)) if 0 < value < math.inf else 10**6


def _growing(ordered: Members) -> list[Members]:
    """The first 1, 2, 3, 4, 6, 9, ... nodes."""
    sizes = [1]
    while sizes[-1] < len(ordered):
        sizes.append(max(sizes[-1] + 1, int(sizes[-1] * _GROWTH)))
    return [ordered[:size] for size in sizes if size < len(ordered)]


def _without(members: Members, out: Members) -> Members:
    names = {node.name for node in out}
    return tuple(node for node in members if node.name not in names)


def _join(one: list[Members], other: list[Members]) -> list[Members]:
    return [*one, *other]
