"""Percentage: a worker takes part in a share of the rounds, and continues alone in between.

Worker w with share p takes part in round r, from 0, if floor((r + 1) p) > floor(r p). So its rounds are
evenly spread, and it takes part in exactly floor(R p) of the first R rounds. Shares are exact fractions:
0.2 is every fifth round. Before round 0 there is a round of all workers, because none knows yet when to
push.

A round ends when all its members have arrived; the update is the mean over their samples, and they get the
new weights. A worker that was alone sends how its weights have changed since it last got some; this delta,
weighted by samples like a gradient, is added, so newer weights are never overwritten. A round without
members ends when every worker has continued alone once. With a share of 1.0 for all workers this is `full`,
executed by a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from echelon.errors import ConfigError
from echelon.sync.families.serve import (
    Arrival,
    Decision,
    Invite,
    Release,
    Rule,
    ServePolicy,
    mean,
    needs_server,
)
from echelon.sync.policy import ClusterInfo

_FINEST = 10**6  # the smallest share is one round in so many


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentage(ServePolicy):
    """A worker takes part in a share of the rounds and continues alone in between.

    `share` is that of all workers, 0.5 by default; `shares` gives one per worker or one per group. With
    by=speed or by=link, the share is a worker's computing or link speed relative to the fastest.
    """

    name: ClassVar[str] = "percentage"
    alone: ClassVar[bool] = True
    share: float | None = None
    shares: tuple[float, ...] | None = None
    by: Literal["given", "speed", "link"] = "given"

    def __post_init__(self) -> None:
        given = {"share": (0.5 if self.share is None else self.share,), "shares": self.shares or ()}
        for option, values in given.items():
            for value in values:
                if not 0 < value <= 1:
                    raise ConfigError(
                        f"{value:g} is not a share of the rounds",
                        where=option,
                        fix="give shares above 0, up to 1.0 for every round",
                    )
        if self.share is not None and (self.shares is not None or self.by != "given"):
            raise ConfigError(
                f"share={self.share:g} is given together with shares or by",
                where="share, shares, by",
                fix="give one of them",
            )
        if self.shares is not None and self.by != "given":
            raise ConfigError(
                f"shares are given together with by={self.by}",
                where="shares, by",
                fix="give one of the two",
            )

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server, one share per worker or group, and known speeds or links if `by` uses them."""
        needs_server(self, cluster)
        self._shares(cluster)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """The rounds of one run."""
        shares = [Fraction(share).limit_denominator(_FINEST) for share in self._shares(cluster)]
        return _PercentageRounds([max(share, Fraction(1, _FINEST)) for share in shares])

    def _shares(self, cluster: ClusterInfo) -> Sequence[float]:
        """Each worker's share."""
        if self.by == "speed":
            return self._relative(cluster.speeds, cluster, "how fast workers compute", "--speed")
        if self.by == "link":
            return self._relative(cluster.links, cluster, "how fast workers' links are", "--lab")
        if self.shares is None:
            return [0.5 if self.share is None else self.share] * cluster.workers
        if len(self.shares) == cluster.workers:
            return self.shares
        if cluster.groups and len(self.shares) == len(cluster.groups):
            of = {w: share for group, share in zip(cluster.groups, self.shares, strict=True) for w in group}
            return [of[worker] for worker in range(cluster.workers)]
        groups = f" and {len(cluster.groups)} groups" if cluster.groups else ""
        raise ConfigError(
            f"{len(self.shares)} shares are given, but there are {cluster.workers} workers{groups}",
            where=f"{self.name}, shares",
            fix="give one share per worker, or one per group",
        )

    def _relative(
        self, known: Sequence[float], cluster: ClusterInfo, what: str, source: str
    ) -> Sequence[float]:
        if len(known) != cluster.workers or not all(value > 0 for value in known):
            raise ConfigError(
                f"by={self.by} needs to know {what}, which is unknown",
                where=f"{self.name}, by",
                fix=f"give it with {source}, or give shares=[...]",
            )
        return [value / max(known) for value in known]


class _PercentageRounds(Rule):
    """The rounds of one run; `_round` is -1 in the first, which contains all workers."""

    def __init__(self, shares: Sequence[Fraction]) -> None:
        self._ratios = [share.as_integer_ratio() for share in shares]
        self._active = set(range(len(shares)))
        self._arrived: dict[int, Arrival] = {}
        self._alone: set[int] = set()
        self._round = -1
        self._missing = set(self._active)

    def arrive(self, arrival: Arrival) -> list[Decision]:
        worker = arrival.worker
        if arrival.kind != "ask":  # also from a worker that is not a member, so that no push is lost
            self._arrived[worker] = arrival
            self._missing.discard(worker)
            return self._settle()
        if worker in self._missing:
            return [Invite(worker)]
        self._alone.add(worker)
        return [Release(worker, fresh=False, ask=True), *self._settle()]

    def leave(self, worker: int, t: float) -> list[Decision]:
        self._active.discard(worker)
        self._missing.discard(worker)
        return self._settle()

    def join(self, worker: int, t: float) -> list[Decision]:
        self._active.add(worker)
        if self._has_turn(worker, self._round):
            self._missing.add(worker)
        return []

    def state(self) -> dict[str, float]:
        return {"round": self._round, "taking_part": len(self._missing) + len(self._arrived)}

    def _has_turn(self, worker: int, number: int) -> bool:
        parts, rounds = self._ratios[worker]
        return (number + 1) * parts // rounds > number * parts // rounds  # always true for round -1

    def _settle(self) -> list[Decision]:
        """Open the next round if this one is complete."""
        if self._missing:
            return []
        if not self._arrived:
            if self._active and self._active <= self._alone:
                self._open()
            return []
        arrivals = [self._arrived[worker] for worker in sorted(self._arrived)]
        self._open()
        return [
            mean(arrivals),
            *(Release(a.worker, ask=not self._has_turn(a.worker, self._round)) for a in arrivals),
        ]

    def _open(self) -> None:
        self._round += 1
        self._arrived, self._alone = {}, set()
        self._missing = {worker for worker in self._active if self._has_turn(worker, self._round)}
