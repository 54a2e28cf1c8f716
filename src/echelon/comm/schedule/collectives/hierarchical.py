"""Hierarchical: consecutive ranks form groups that sum inside, then between groups, then distribute inside.

Inside a group the `inner` collective is used, between groups the `outer` one; each is any collective with
its options, so `outer="hierarchical(group=4)"` makes a third level. With an outer ring, each of G groups
sends 2 (G-1)/G n elements to the others, however many members it has; a flat ring in which the members of
groups alternate sends g times as many for groups of g.

Rails. With `rails` each member sums one slice of the buffer with its counterparts of the other groups, so
that all members' links to the outside are used at once. Without, only the first member of each group
communicates outside. Groups of unequal size have as many rails as the smallest group has members: the other
members of larger groups pass the ranges that they own to their group's rails, and get the results back.

Inner collectives with two halves (`Scattering`: ring, direct, halving-doubling, binary-blocks, ps) are
split: reduce-scatter, outer sum, all-gather. Others (butterfly, hierarchical) run as a whole; at the end
each rail sends its slice to the others, along a tree if there is only one rail. To add levels, nest in
`outer`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import ClassVar, NamedTuple

from echelon.comm.schedule.collective import (
    COLLECTIVES,
    Collective,
    Move,
    Scattering,
    Schedule,
    ScheduleStep,
    on,
    pieces,
    trim,
)
from echelon.comm.schedule.spread import broadcast
from echelon.errors import ConfigError

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchical(Collective):
    """Sums inside groups, then between them; best where links between groups are slow.

    `group` is the number of workers in a group, 0 for about the square root of all; the last group may be
    smaller. `sizes` gives each group's number of workers instead.
    """

    name: ClassVar[str] = "hierarchical"
    group: int = 0
    inner: str = "ring"
    outer: str = "ring"
    rails: bool = True
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.group < 0:
            raise ConfigError(
                f"a group cannot have {self.group} workers",
                where="group",
                fix="give 1 or more, or 0 for about the square root of all workers",
            )
        if self.sizes is not None and self.group:
            raise ConfigError(
                "both group and sizes are given", where="group, sizes", fix="give one of the two"
            )
        if self.sizes is not None and (not self.sizes or min(self.sizes) < 1):
            raise ConfigError(
                f"sizes cannot be {list(self.sizes)}",
                where="sizes",
                fix="give each group's number of workers, 1 or more, such as sizes=[4, 4, 3]",
            )
        self._levels()

    def group_sizes(self, size: int) -> list[int]:
        """The number of workers in each group; consecutive ranks share a group."""
        if self.sizes is not None:
            return list(self.sizes)
        if self.group:
            return [stop - start for start, stop in _every(self.group, size)]
        return [stop - start for start, stop in pieces(0, size, _even_count(size))]

    def check(self, size: int) -> None:
        """The sizes must sum to the number of workers, and both levels must support their groups."""
        sizes = self.group_sizes(size)
        if sum(sizes) != size:
            raise ConfigError(
                f"groups of {sizes} are {sum(sizes)} workers, but there are {size}",
                where="collective hierarchical, sizes",
                fix="give sizes that sum to the number of workers, or leave them out",
            )
        inner, outer = self._levels()
        for members in sorted(set(sizes)):
            inner.check(members)
        outer.check(len(sizes))

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """To the rails, along the rail, and back."""
        self.check(size)
        inner, outer = self._levels()
        sizes = self.group_sizes(size)
        if len(sizes) == 1:
            return inner.schedule(rank, size, length)
        starts = list(accumulate(sizes, initial=0))
        group = bisect_right(starts, rank) - 1
        members = range(starts[group], starts[group + 1])
        position = rank - members.start
        rails = min(sizes) if self.rails else 1
        if isinstance(inner, Scattering):
            inside = _split(inner, position, len(members), rails, length)
        else:
            inside = _whole(inner, position, len(members), rails, length)
        between: Schedule = []
        if position < rails:
            start, stop = inside.slices[position]
            rail = [first + position for first in starts[:-1]]
            between = on(rail, outer.schedule(group, len(sizes), stop - start), start)
        return trim(on(members, inside.down) + between + on(members, inside.up))

    def _levels(self) -> tuple[Collective, Collective]:
        return _built(self.inner, "inner"), _built(self.outer, "outer")


@lru_cache(maxsize=64)
def _built(text: str, where: str) -> Collective:
    """Cached, because each schedule needs it and parsing takes longer than the schedule."""
    return COLLECTIVES.build(text, where=where)


class _Inside(NamedTuple):
    """The rails' slices, and a worker's steps inside its group before and after the rails sum."""

    slices: list[Range]
    down: Schedule
    up: Schedule


def _split(inner: Scattering, position: int, size: int, rails: int, length: int) -> _Inside:
    """Reduce-scatter, pass owned ranges to the rails; then the results back, and all-gather.

    A slice is what a member of the smallest group owns, so groups of that size have nothing to pass.
    """
    slices = [inner.owned_range(k, rails, length) for k in range(rails)] if rails > 1 else [(0, length)]
    mine = inner.owned_range(position, size, length)
    gives = tuple(Move(k, *_overlap(mine, slices[k])) for k in range(rails) if k != position)
    gets: tuple[Move, ...] = ()
    if position < rails:
        others = [other for other in range(size) if other != position]
        owned = [inner.owned_range(other, size, length) for other in others]
        overlaps = [_overlap(theirs, slices[position]) for theirs in owned]
        gets = tuple(Move(other, *part) for other, part in zip(others, overlaps, strict=True))
    down = [*inner.reduce_scatter(position, size, length), ScheduleStep(sends=gives, takes=gets)]
    up = [ScheduleStep(sends=gets, takes=gives), *inner.all_gather(position, size, length)]
    return _Inside(slices, trim(down), trim(up))


def _whole(inner: Collective, position: int, size: int, rails: int, length: int) -> _Inside:
    """All members get the group's sum; at the end each rail sends its slice to the others."""
    slices = pieces(0, length, rails)
    down = inner.schedule(position, size, length)
    if rails == 1:
        return _Inside(slices, down, broadcast(position, size, length))
    others = [other for other in range(size) if other != position]
    step = ScheduleStep(
        sends=tuple(Move(other, *slices[position]) for other in others if position < rails),
        takes=tuple(Move(other, *slices[other]) for other in others if other < rails),
    )
    return _Inside(slices, down, trim([step]))


def _overlap(one: Range, other: Range) -> Range:
    """The intersection of two ranges, possibly empty."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _every(group: int, size: int) -> list[Range]:
    return [(start, min(start + group, size)) for start in range(0, size, group)]


def _even_count(size: int) -> int:
    """About the square root; preferably such that groups are equal, because then each member is a rail."""
    root = math.isqrt(size)
    equal = [count for count in range(1, root + 1) if size % count == 0 and 4 * count * count >= size]
    return max(equal, default=round(math.sqrt(size)))
