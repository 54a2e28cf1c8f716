"""Which workers exchange encoded gradients: all with all, or one worker of each site with the other sites'.

Between sites (slow links) gradients are sent encoded; inside a site they are added in full precision first.
Each rail of a site has a part of every parameter (`codec.owners`), which it exchanges with the same rail of
the other sites. There are as many rails as the smallest site has workers. A rail holds the residuals of its
site for its part, whatever bucket the parameter is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.codec.fitting import check_sites, own_transports_only
from echelon.comm.group import Group

STAGES = 2  # exchanges of a round, at most; each has its own order of operations


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A worker's site: groups to sum before the exchange (`down`) and to share its result (`up`)."""

    down: Group
    up: Group
    rails: int
    position: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The groups of a worker's exchanges: `between` has one for each stage; none if it is on no rail."""

    between: tuple[Group, ...]
    inside: Site | None = None

    @property
    def anyone(self) -> Group:
        """A group with this worker."""
        return self.inside.down if self.inside is not None else self.between[0]

    @property
    def rail(self) -> int | None:
        """The part of every parameter that this worker exchanges; None for all of it."""
        return self.inside.position if self.inside is not None else None


def flat(group: Group) -> Route:
    """All workers exchange with each other."""
    return Route(between=tuple(group.fork() for _ in range(STAGES)))


def by_site(group: Group, sites: Sequence[Sequence[int]]) -> Route:
    """Sites sum inside; their rails exchange. All workers call this together."""
    check_sites(sites)
    if not group.own_transport:
        raise own_transports_only()
    rails = min(len(site) for site in sites)
    inside: Site | None = None
    for site in sites:  # all workers call this for all sites, in the same order
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
