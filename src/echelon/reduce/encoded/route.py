"""Who exchanges encoded pieces with whom: all with all, or one worker of each site with the others'.

Between sites (thin links) gradients travel encoded; inside a site they are added in full precision first.
Of a parameter, each of a site's rails has a part (`codec.owners`), which it exchanges with its counterparts
of the other sites. There are as many rails as the smallest site has workers. What a rail owes (residuals)
is that of its site, and stays with it, whatever buckets the parameter is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.codec.fitting import check_sites, own_transports_only
from echelon.comm.group import Group

STAGES = 2  # exchanges of a round, at most; each has an order of operations of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A worker's site: its members add up before encoded pieces leave, and share what has come back."""

    down: Group
    up: Group
    rails: int
    position: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a worker's pieces go. `between` has a group for each stage; none, if it is no rail."""

    between: tuple[Group, ...]
    inside: Site | None = None

    @property
    def anyone(self) -> Group:
        """Some group that this worker is in."""
        return self.inside.down if self.inside is not None else self.between[0]

    @property
    def rail(self) -> int | None:
        """Which part of every parameter this worker exchanges; None if all of it."""
        return self.inside.position if self.inside is not None else None


def flat(group: Group) -> Route:
    """All workers exchange with each other."""
    return Route(between=tuple(group.fork() for _ in range(STAGES)))


def by_site(group: Group, sites: Sequence[Sequence[int]]) -> Route:
    """Sites add up inside; their rails exchange. All workers call this together."""
    check_sites(sites)
    if not group.own_transport:
        raise own_transports_only()
    rails = min(len(site) for site in sites)
    inside: Site | None = None
    for site in sites:  # everybody makes all of them, in the same order; others' are None
        down, up = (group.subgroup(site) for _ in range(2))
        if down is not None and up is not None:
            position = list(site).index(group.rank)
            inside = Site(down=down, up=up, rails=rails, position=position, size=len(site))
    between: list[Group] = []
    for rail in range(rails):
        members = sorted(site[rail] for site in sites)
        made = [group.subgroup(members) for _ in range(STAGES)]
        between += [one for one in made if one is not None]
    assert inside is not None
    return Route(between=tuple(between), inside=inside)
