"""Elastic averaging in its two forms: what `elastic-averaging` is carried out as.

A spring ties each worker's weights x_i to a center c (Zhang, Choromanska and LeCun, 2015). From time to
time both are pulled towards each other by the same force alpha (x_i - c):

    synchronous, N workers at once         x_i <- x_i - alpha (x_i - c),  c <- c + alpha sum_j (x_j - c)
    asynchronous, a worker when it comes   x_i <- x_i - alpha (x_i - c),  c <- c + alpha (x_i - c)

with the values from before on the right. Synchronously c moves by beta = N alpha of the way to the mean, so
it is stable for beta <= 1. The asynchronous form replaces both by averages of each other, stable for any
alpha in (0, 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from echelon.errors import ConfigError
from echelon.sync.families.mix import Average, Meeting, MixPolicy
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

BETA = 0.9  # how far the center goes to the mean of the workers, as in the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousElastic(MixPolicy):
    """All workers and the center are pulled towards each other after every `period` steps."""

    name: ClassVar[str] = "elastic-averaging"
    shown: ClassVar[Literal["mean", "own", "center"]] = "center"
    weighs: ClassVar[bool] = False
    alpha: float | None
    period: int

    def force(self, cluster: ClusterInfo) -> float:
        """Alpha; 0.9 / N, if it is not given."""
        return BETA / cluster.workers if self.alpha is None else self.alpha

    def check(self, cluster: ClusterInfo) -> None:
        """Beyond N alpha = 1 the center overshoots."""
        if self.force(cluster) * cluster.workers > 1 + 1e-9:
            raise ConfigError(
                f"alpha={self.alpha} with {cluster.workers} workers throws the center beyond their mean",
                where="--sync elastic-averaging, alpha",
                fix=f"give at most 1 / {cluster.workers}, or leave it out for {BETA} / {cluster.workers}",
            )

    def meeting(self, step: int, rank: int, cluster: ClusterInfo) -> Meeting | None:
        """All, when the period is over."""
        return None if (step + 1) % self.period else Average(tuple(range(cluster.workers)))

    def start(self, own: Tensor, memory: dict[str, Tensor]) -> None:
        """The center is where all begin; every worker keeps its own copy of it."""
        memory["center"] = own.clone()

    def settle(
        self, own: Tensor, mean: Tensor, memory: dict[str, Tensor], meeting: Average, cluster: ClusterInfo
    ) -> None:
        """The worker gives way first, while the center is where it was."""
        center, alpha = memory["center"], self.force(cluster)
        own.add_(center - own, alpha=alpha)
        center.add_(mean - center, alpha=alpha * cluster.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsynchronousElastic(ServePolicy):
    """A worker and the server's weights are pulled towards each other when it comes; nobody waits."""

    name: ClassVar[str] = "elastic-averaging"
    pushes: ClassVar[Literal["gradient", "weights"]] = "weights"
    alpha: float
    period: int

    def check(self, cluster: ClusterInfo) -> None:
        """The server holds the center."""
        needs_server(self, cluster)

    @property
    def push_every(self) -> int:
        """Weights are exchanged in both directions when the period is over."""
        return self.period

    @property
    def pull_every(self) -> int:
        """As often as it pushes."""
        return self.period

    def rule(self, cluster: ClusterInfo) -> Rule:
        """Nothing to remember."""
        return _WhenItComes()

    def meet(self, center: Tensor, theirs: Tensor) -> Tensor:
        """Both give way by the same."""
        way = (theirs - center).mul_(self.alpha)
        center.add_(way)
        return theirs - way


class _WhenItComes(Rule):
    def arrive(self, arrival: Arrival) -> list[Decision]:
        return [Apply((WeightedPush(arrival.worker, arrival.step, 1.0),)), Release(arrival.worker)]
