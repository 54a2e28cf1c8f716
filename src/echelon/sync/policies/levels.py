"""Levels: one policy inside groups of workers, another one between the groups.

A group acts as one worker towards the others: inside it the workers compute the gradient of their common
batch (full), and its first member pushes, pulls or averages on behalf of all. So `full` inside a site and
`percentage`, `local` or `async` between sites is levels(full, "percentage(0.5)").

Inside may also be a policy of averages (local, gossip); then so must be the one between groups: before they
meet, each takes the mean of its members.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.mix import MixPolicy
from echelon.sync.policy import POLICIES, ClusterInfo, Family, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels(Policy):
    """One policy inside groups of workers (sites, say), another one between them."""

    name: ClassVar[str] = "levels"
    family: ClassVar[Family] = "levels"
    inner: str = "full"
    outer: str = "local(8)"

    def __post_init__(self) -> None:
        inside, between = self.inside, self.between
        if inside.family not in ("reduce", "mix") or between.family not in ("reduce", "mix", "serve"):
            bad = self.inner if inside.family not in ("reduce", "mix") else self.outer
            raise ConfigError(
                f"{bad} cannot be a level",
                where="sync levels",
                fix="inside a group use full or a policy of averages; between groups not hogwild or levels",
            )
        if isinstance(inside, MixPolicy) and inside.shown == "center":
            raise ConfigError(
                f"{self.inner} keeps a center, which groups that meet would not know of",
                where="sync levels",
                fix="use full, gossip or local without an outer step inside",
            )
        if isinstance(inside, MixPolicy) and between.family != "mix":
            raise ConfigError(
                f"with {self.inner} inside, groups have weights to average, no gradient for {self.outer}",
                where="sync levels",
                fix="use full inside, or local, gossip or elastic-averaging between groups",
            )

    @property
    def inside(self) -> Policy:
        """The policy inside a group."""
        return POLICIES.build(self.inner, where="levels, inner").resolved()

    @property
    def between(self) -> Policy:
        """The policy between groups."""
        return POLICIES.build(self.outer, where="levels, outer").resolved()

    def resolved(self) -> Policy:
        """Full inside and full between is full."""
        return self.between if self.inside.family == self.between.family == "reduce" else self

    def check(self, cluster: ClusterInfo) -> None:
        """Needs groups, and both policies must work with theirs."""
        if len(cluster.groups) < 2:
            raise ConfigError(
                "levels need two groups of workers or more",
                where="--sync",
                fix="say who is in which with --groups, or use a lab with several sites",
            )
        members = sorted(rank for group in cluster.groups for rank in group)
        if members != list(range(cluster.workers)):
            raise ConfigError(
                f"groups {list(map(list, cluster.groups))} do not hold each of {cluster.workers} workers"
                " exactly once",
                where="--groups",
                fix="put every worker into exactly one group",
            )
        for group in cluster.groups:
            self.inside.check(members_of(cluster, group))
        self.between.check(units_of(cluster))


def members_of(cluster: ClusterInfo, group: tuple[int, ...]) -> ClusterInfo:
    """One group as a crew of its own."""

    def of(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[rank] for rank in group) if values else ()

    return replace(
        cluster,
        workers=len(group),
        groups=(),
        shares=of(cluster.shares),
        speeds=of(cluster.speeds),
        links=of(cluster.links),
    )


def units_of(cluster: ClusterInfo) -> ClusterInfo:
    """The groups as a crew: shares add up, the slowest member sets the pace, the first one talks."""
    return replace(
        cluster,
        workers=len(cluster.groups),
        groups=(),
        shares=tuple(sum(cluster.shares[rank] for rank in group) for group in cluster.groups)
        if cluster.shares
        else tuple(float(len(group)) for group in cluster.groups),
        speeds=tuple(min(cluster.speeds[rank] for rank in group) for group in cluster.groups)
        if cluster.speeds
        else (),
        links=tuple(cluster.links[group[0]] for group in cluster.groups) if cluster.links else (),
    )
