"""Levels of groups, and the collective that sums along them.

The first seed, section III-B: n nodes form √n groups of √n, and each group is divided again, so that no
ring has more than a few members; at each level a ring or a server; between groups one communicating node,
or rails. Levels are counted from the bottom: level 0 are groups of nodes, level 1 groups of those groups,
and so on; the top sums between the groups of the last level. Every node is at the same depth; a group of
one stands for a branch that is shorter.

`candidate_hierarchies` gives those worth comparing: the flat ring first, one server for all, then groups,
by site, by transfer cost and power, √n of √n, and each of these divided again. A search chooses by cost.

`hierarchical` groups consecutive ranks, so a hierarchy comes with the order of its nodes. The first node of
each group communicates without rails, and is the server of its group: it is the one with the best link.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Literal

from echelon.config.call import Call, parse_call
from echelon.errors import ConfigError
from echelon.plan.grouping import separate
from echelon.plan.groups import Groups
from echelon.plan.topology import Node, Topology

LevelAlgorithm = Literal["ring", "ps"]  # a ring, or a server: the first member sums for all
RING_MEMBERS = 8  # rings of more members are divided where levels are divided again
_CHOICES: tuple[LevelAlgorithm, LevelAlgorithm] = ("ring", "ps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How many members each group of a level has, how they sum, and whether all of them talk outside."""

    sizes: tuple[int, ...]
    algorithm: LevelAlgorithm = "ring"
    rails: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Nodes in the order in which consecutive ones are neighbours, and levels over them.

    shape   how it came about: `flat`, `sites`, `√n`, ...
    top     how the groups of the last level sum with each other; all nodes, without levels
    """

    order: tuple[str, ...]
    levels: tuple[Level, ...] = ()
    top: LevelAlgorithm = "ring"
    shape: str = "flat"

    def __post_init__(self) -> None:
        units = len(self.order)
        if len(set(self.order)) != units or not units:
            raise ConfigError(
                "a node is missing or there twice", where="hierarchy", fix="name every node exactly once"
            )
        for at, level in enumerate(self.levels):
            if sum(level.sizes) != units or min(level.sizes, default=0) < 1:
                raise ConfigError(
                    f"level {at} has groups of {list(level.sizes)}, but there are {units} members",
                    where="hierarchy",
                    fix="give sizes of at least 1 that sum to the number of members",
                )
            units = len(level.sizes)

    def groups(self, level: int = 0) -> tuple[tuple[str, ...], ...]:
        """The nodes of each group of a level."""
        starts = list(range(len(self.order) + 1))
        for one in self.levels[: level + 1]:
            starts = [starts[at] for at in accumulate(one.sizes, initial=0)]
        return tuple(self.order[start:stop] for start, stop in pairwise(starts))

    def ranks(self, nodes: Sequence[str]) -> Groups:
        """The groups of the lowest level as ranks, for nodes by rank; empty without levels."""
        place = {name: rank for rank, name in enumerate(nodes)}
        return tuple(tuple(place[name] for name in group) for group in self.groups()) if self.levels else ()

    @property
    def collective(self) -> str:
        """The text for `--collective`."""
        return to_collective(self)


def to_collective(tree: Hierarchy) -> str:
    """The nested text for `--collective`; ranks are those of `tree.order`."""
    text: str = tree.top
    for level in reversed(tree.levels):
        options = {
            "sizes": list(level.sizes),
            "inner": level.algorithm,
            "outer": text,
            "rails": level.rails,
        }
        text = str(Call("hierarchical", (), options))  # type: ignore[arg-type]
    return text


def from_collective(text: str, order: Sequence[str]) -> Hierarchy:
    """The hierarchy that a text of `to_collective` describes, for nodes in their order."""
    levels = []
    while (call := parse_call(text)).name == "hierarchical":
        options = dict(call.options)
        sizes, inner = options.get("sizes"), _algorithm(options.get("inner", "ring"))
        if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
            raise ConfigError(
                f"{text} does not give the sizes of its groups", where="collective", fix="add sizes=[...]"
            )
        whole = tuple(size for size in sizes if isinstance(size, int))
        levels.append(Level(sizes=whole, algorithm=inner, rails=options.get("rails", True) is True))
        text = str(options.get("outer", "ring"))
    shape = "flat" if not levels else "given"
    return Hierarchy(order=tuple(order), levels=tuple(levels), top=_algorithm(call.name), shape=shape)


def _algorithm(name: object) -> LevelAlgorithm:
    if name == "ring" or name == "ps":
        return "ring" if name == "ring" else "ps"
    raise ConfigError(f"a level cannot use {name}", where="collective", fix="use ring or ps at each level")


def nested_sizes(groups: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """Divide groups of these sizes until none has more than `most` members: the sizes of each level.

    A group of g is divided into about √g subgroups, and the subgroups in the same way; if these are still
    more than `most`, they form groups too.
    """
    if most < 2:
        raise ConfigError(f"groups of at most {most}", where="hierarchy", fix="allow 2 or more in a group")
    if max(groups) <= most:
        return [tuple(groups)]
    counts = [root_count(size) if size > most else 1 for size in groups]
    parts = [part for size, count in zip(groups, counts, strict=True) for part in even(size, count)]
    return nested_sizes(parts, most) + nested_sizes(counts, most)


def square_root_sizes(count: int, most: int | None = None) -> list[tuple[int, ...]]:
    """√n groups of √n; with `most`, divided again until no ring has more members. Without the top."""
    if most is None:
        return [tuple(even(count, root_count(count)))] if count > 3 else []
    return nested_sizes([count], most)[:-1]


def root_count(count: int) -> int:
    """About the square root; preferably a divisor, so that groups are equal and all members are rails."""
    root = math.sqrt(count)
    near = [parts for parts in range(2, count) if count % parts == 0 and root / 1.5 < parts < 1.5 * root]
    return min(near, key=lambda parts: (abs(math.log(parts / root)), parts), default=max(1, round(root)))


def even(count: int, parts: int) -> list[int]:
    """Sizes that differ by at most one, the larger first."""
    small, more = divmod(count, parts)
    return [small + 1] * more + [small] * (parts - more)


def candidate_hierarchies(
    topology: Topology, members: Sequence[str], *, most_levels: int = 3, most: int = RING_MEMBERS
) -> list[Hierarchy]:
    """Different hierarchies of the members, of at most `most_levels` levels, counting the top."""
    if not members:
        raise ConfigError("no node takes part", where="hierarchy", fix="name at least one node")
    nodes = [topology.node(name) for name in members]
    found: dict[tuple[tuple[str, ...], str], Hierarchy] = {}
    for one in _candidates(topology, nodes, most):
        if len(one.levels) < most_levels:
            found.setdefault((one.order, to_collective(one)), one)
    return list(found.values())


def hierarchies_of_groups(topology: Topology, groups: Sequence[Sequence[str]]) -> list[Hierarchy]:
    """The hierarchies in which exactly these groups sum first; flat ones if only one group is left."""
    parts = [best_first([topology.node(name) for name in group]) for group in groups if group]
    order = [node for part in parts for node in part]
    sizes = tuple(map(len, parts))
    found = list(_variants(order, [sizes], "given groups"))
    if found:
        return found
    names = tuple(node.name for node in order)
    return [Hierarchy(order=names), Hierarchy(order=names, top="ps")]


def neighbours(topology: Topology, nodes: Sequence[Node]) -> list[list[Node]]:
    """The nodes by site, sites next to each other if they are near; best link first in each site."""
    left = list(dict.fromkeys(node.site for node in nodes))
    order = left[:1]
    while len(order) < len(left):
        last = order[-1]
        rest = [site for site in left if site not in order]
        order.append(min(rest, key=lambda site: _far(topology, last, site)))
    return [best_first([node for node in nodes if node.site == site]) for site in order]


def best_first(nodes: Sequence[Node]) -> list[Node]:
    """The node with the best link first, because it talks outside or is the server; the others as given."""
    best = max(nodes, key=lambda node: min(node.up_bytes_per_s, node.down_bytes_per_s))
    return [best, *(node for node in nodes if node is not best)]


def _far(topology: Topology, one: str, other: str) -> tuple[int, float, float]:
    path = topology.route(one, other)
    rate = min((uplink.bytes_per_s for uplink in path), default=0.0)
    return len(path), -rate, sum(uplink.latency_s for uplink in path)


def _candidates(topology: Topology, nodes: Sequence[Node], most: int) -> Iterator[Hierarchy]:
    by_site = neighbours(topology, nodes)
    order = [node for site in by_site for node in site]
    names = tuple(node.name for node in order)
    yield Hierarchy(order=names)
    best = tuple(node.name for node in best_first(order))
    yield Hierarchy(order=best, top="ps")
    if len(names) < 3:
        return
    sizes = [len(site) for site in by_site]
    if len(sizes) > 1:
        yield from _variants(order, [tuple(sizes)], "sites")
    yield from _by_power(topology, by_site)
    yield from _variants(order, square_root_sizes(len(names)), "√n")
    if len(sizes) > 1 and max(sizes) > 3:
        inside = nested_sizes(sizes, max(2, min(most, max(sizes) - 1)))
        yield from _variants(order, inside, "sites, then √n")
    if len(names) > most:
        yield from _variants(order, square_root_sizes(len(names), most), "√n, again and again")
    yield from _variants(order, square_root_sizes(len(names), 4), "√n down to groups of 4")


def _by_power(topology: Topology, by_site: Sequence[Sequence[Node]]) -> Iterator[Hierarchy]:
    """Groups by transfer cost and order of magnitude of compute power, if they differ from sites."""
    nodes = [node for site in by_site for node in site]
    here = Topology(nodes=tuple(nodes), uplinks=topology.uplinks)
    # Sites without members may lie between others, so the groups are those of the whole topology.
    chosen = {node.name for node in nodes}
    whole = separate(topology) if set(here.sites) != set(topology.sites) else separate(here)
    groups = [[name for name in group if name in chosen] for group in whole]
    parts = [best_first([topology.node(name) for name in group]) for group in groups if group]
    home = {node.name: at for at, site in enumerate(by_site) for node in site}
    parts.sort(key=lambda part: home[part[0].name])
    if len(parts) > 1:
        yield from _variants(
            [node for part in parts for node in part], [tuple(map(len, parts))], "transfer and power"
        )


def _variants(order: Sequence[Node], sizes: Sequence[tuple[int, ...]], shape: str) -> Iterator[Hierarchy]:
    """A ring or a server at each level, rails or one communicating node; none where it is flat anyway."""
    kept = [level for level in sizes if max(level) > 1 and len(level) > 1]
    if not kept or len(kept) != len(sizes):
        return
    names = _leaders_first(order, kept[0])
    for algorithms in product(_CHOICES, repeat=len(kept) + 1):
        for rails in (True, False):
            levels = tuple(
                # A server owns the whole sum, and so does a group's only member: there is one rail.
                Level(
                    sizes=level, algorithm=algorithm, rails=rails and algorithm == "ring" and min(level) > 1
                )
                for level, algorithm in zip(kept, algorithms, strict=False)
            )
            if rails and not any(level.rails for level in levels):
                continue
            yield Hierarchy(order=names, levels=levels, top=algorithms[-1], shape=shape)


def _leaders_first(order: Sequence[Node], sizes: Sequence[int]) -> tuple[str, ...]:
    """The node with the best link first in each group of the lowest level."""
    names: list[str] = []
    at = 0
    for size in sizes:
        names += [node.name for node in best_first(order[at : at + size])]
        at += size
    return tuple(names)
