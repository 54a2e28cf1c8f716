"""Levels: one policy inside groups of workers, another one between the groups.

Towards the other groups, a group acts as one worker: its members compute the gradient of their common batch
(full), and its first member pushes, pulls or averages for all. Example: levels(full, "percentage(0.5)").

The inner policy may also average weights (local, gossip). Then the outer policy must average weights too:
before groups average with each other, each takes the mean of its members.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.mix import MixPolicy
from echelon.sync.policy import POLICIES, ClusterInfo, Family, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels(Policy):
    """One policy inside groups of workers, such as sites, and another one between groups."""

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
                fix="use full, local or gossip inside groups; between them anything but hogwild and levels",
            )
        if isinstance(inside, MixPolicy) and inside.shown == "center":
            raise ConfigError(
                f"{self.inner} keeps a center inside groups, which averages between groups would ignore",
                where="sync levels",
                fix="use full, gossip or local without an outer step inside",
            )
        if isinstance(inside, MixPolicy) and between.family != "mix":
            raise ConfigError(
                f"with {self.inner} inside, groups have weights to average; {self.outer} needs gradients",
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
        """Full if both levels are full."""
        return self.between if self.inside.family == self.between.family == "reduce" else self

    def check(self, cluster: ClusterInfo) -> None:
        """Needs groups, and both policies must work with them."""
        if len(cluster.groups) < 2:
            raise ConfigError(
                "levels needs two groups of workers or more",
                where="--sync",
                fix="give the groups with --groups, or use a lab with several sites",
            )
        members = sorted(rank for group in cluster.groups for rank in group)
        if members != list(range(cluster.workers)):
            raise ConfigError(
                f"groups {list(map(list, cluster.groups))} do not contain each of {cluster.workers} workers"
                " exactly once",
                where="--groups",
                fix="put every worker into exactly one group",
            )
        for group in cluster.groups:
            self.inside.check(members_of(cluster, group))
        self.between.check(units_of(cluster))


def members_of(cluster: ClusterInfo, group: tuple[int, ...]) -> ClusterInfo:
    """The members of one group as a cluster."""

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
    """The groups as a cluster: a group has the sum of shares, the lowest speed, the first member's link."""
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
