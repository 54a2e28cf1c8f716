"""The two forms of elastic averaging, which `elastic-averaging` chooses from.

A spring ties each worker's weights x_i to a center c (Zhang, Choromanska and LeCun, 2015). From time to
time both are pulled towards each other by the same force alpha (x_i - c):

    synchronous, N workers at once     x_i <- x_i - alpha (x_i - c),  c <- c + alpha sum_j (x_j - c)
    asynchronous, one worker i         x_i <- x_i - alpha (x_i - c),  c <- c + alpha (x_i - c)

with the old values on the right. In the synchronous form c moves by beta = N alpha of the way to the mean,
so it is stable for beta <= 1. The asynchronous form is stable for any alpha in (0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from echelon.errors import ConfigError
from echelon.sync.families.mix import Average, Averaging, MixPolicy
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Release,
    Rule,
    ServePolicy,
    WeightedPush,
    needs_server,
)
from echelon.sync.policy import ClusterInfo

if TYPE_CHECKING:
    from torch import Tensor

BETA = 0.9  # part of the way that the center moves to the workers' mean, as in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousElastic(MixPolicy):
    """All workers and the center are pulled towards each other after every `period` steps."""

    name: ClassVar[str] = "elastic-averaging"
    shown: ClassVar[Literal["mean", "own", "center"]] = "center"
    weighs: ClassVar[bool] = False
    alpha: float | None
    period: int

    def force(self, cluster: ClusterInfo) -> float:
        """Alpha; 0.9 / N for N workers if it is not given."""
        return BETA / cluster.workers if self.alpha is None else self.alpha

    def check(self, cluster: ClusterInfo) -> None:
        """Refuses alpha > 1 divided by the number of workers: the center would overshoot the mean."""
        if self.force(cluster) * cluster.workers > 1 + 1e-9:
            raise ConfigError(
                f"with alpha={self.alpha} and {cluster.workers} workers the center overshoots their mean",
                where="--sync elastic-averaging, alpha",
                fix=f"give at most 1 / {cluster.workers}, or leave it out for {BETA} / {cluster.workers}",
            )

    def averaging(self, step: int, rank: int, cluster: ClusterInfo) -> Averaging | None:
        """All workers, after every `period` steps."""
        return None if (step + 1) % self.period else Average(tuple(range(cluster.workers)))

    def start(self, own: Tensor, memory: dict[str, Tensor]) -> None:
        """Start the center at the initial weights; every worker keeps its own copy of it."""
        memory["center"] = own.clone()

    def settle(
        self, own: Tensor, mean: Tensor, memory: dict[str, Tensor], average: Average, cluster: ClusterInfo
    ) -> None:
        """Move the worker towards the old center, then the center towards the mean."""
        center, alpha = memory["center"], self.force(cluster)
        own.add_(center - own, alpha=alpha)
        center.add_(mean - center, alpha=alpha * cluster.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousElastic(ServePolicy):
    """A worker and the server's weights are pulled towards each other on arrival; nobody waits."""

    name: ClassVar[str] = "elastic-averaging"
    pushes: ClassVar[Literal["gradient", "weights"]] = "weights"
    alpha: float
    period: int

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server, which holds the center."""
        needs_server(self, cluster)

    @property
    def push_every(self) -> int:
        """Every `period` steps."""
        return self.period

    @property
    def pull_every(self) -> int:
        """Every `period` steps."""
        return self.period

    def rule(self, cluster: ClusterInfo) -> Rule:
        """A rule without state."""
        return _ElasticRule()

    def meet(self, center: Tensor, theirs: Tensor) -> Tensor:
        """Move the center and the worker's weights towards each other by the same amount."""
        change = (theirs - center).mul_(self.alpha)
        center.add_(change)
        return theirs - change


class _ElasticRule(Rule):
    def arrive(self, arrival: Arrival) -> list[Decision]:
        return [Apply((WeightedPush(arrival.worker, arrival.step, 1.0),)), Release(arrival.worker)]
