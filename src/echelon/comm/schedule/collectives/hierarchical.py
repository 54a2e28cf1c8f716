"""Hierarchical: consecutive workers form groups that sum inside, then among each other, then spread inside.

Inside a group elements travel by the `inner` collective, between groups by the `outer` one; each is any
collective with its options, so `outer="hierarchical(group=4)"` makes a third level. By an outer ring, each
of G groups sends 2 (G-1)/G n elements to the others, however many members it has; by a flat ring in which
the members of groups alternate, g times as many for groups of g.

Rails. With `rails` every member sums a slice of the buffer with its counterparts of the other groups, so
that all members' links to the outside are used at once. Without, only the first member of each group
communicates outside. Groups of unequal size have as many rails as the smallest has members: the members of
larger groups hand the ranges that they own to their group's rails, and get the results back from them.

Inner collectives of two halves (`Scattering`: ring, direct, halving-doubling, binary-blocks, ps) are cut in
the middle: reduce-scatter, outer sum, all-gather. Others (butterfly, hierarchical) run whole; at the end
each rail gives the others its slice, along a tree if there is one rail. To add levels, nest in `outer`.
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

    `group` is the number of workers in a group, 0 for about the square root of all; the last group has the
    rest. `sizes` gives each group's number of workers instead.
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
                f"{list(self.sizes)} are no sizes of groups",
                where="sizes",
                fix="give each group's number of workers, 1 or more, such as sizes=[4, 4, 3]",
            )
        self._levels()

    def group_sizes(self, size: int) -> list[int]:
        """How many workers each group has; consecutive ranks are in one group."""
        if self.sizes is not None:
            return list(self.sizes)
        if self.group:
            return [stop - start for start, stop in _every(self.group, size)]
        return [stop - start for start, stop in pieces(0, size, _even_count(size))]

    def check(self, size: int) -> None:
        """Given sizes must be those of all workers, and both levels must serve their groups."""
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
        """Down to the rails, along the rail, and back up."""
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
            inside = _cut(inner, position, len(members), rails, length)
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
    """Kept, for every schedule asks for it, and reading the text takes longer than the schedule."""
    return COLLECTIVES.build(text, where=where)


class _Inside(NamedTuple):
    """What a worker does inside its group before and after the rails sum their slices."""

    slices: list[Range]
    down: Schedule
    up: Schedule


def _cut(inner: Scattering, position: int, size: int, rails: int, length: int) -> _Inside:
    """Reduce-scatter, hand what is owned to the rails; back again, all-gather.

    A slice is what a member of the smallest group owns, so groups of that size have nothing to hand over.
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
    """Everybody gets the group's sum; in the end each rail gives the others its slice."""
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
    """What two ranges share; an empty range if nothing."""
    start = max(one[0], other[0])
    return start, max(start, min(one[1], other[1]))


def _every(group: int, size: int) -> list[Range]:
    return [(start, min(start + group, size)) for start in range(0, size, group)]


def _even_count(size: int) -> int:
    """About the square root, rather such that all groups are equal: then every member is a rail."""
    root = math.isqrt(size)
    equal = [count for count in range(1, root + 1) if size % count == 0 and 4 * count * count >= size]
    return max(equal, default=round(math.sqrt(size)))
