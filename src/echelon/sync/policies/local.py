"""Local steps: each worker takes k steps of its own, then all average their weights.

With two levels, `periods=[4, 16]` averages inside each group after every 4 steps, and among all workers
after every 16; if both are due, only among all.

With an outer step, workers do not simply take the mean of all. The difference from the center c, the
weights after the previous average of all, to the mean counts as a step to which momentum is added:

    v <- momentum v + lr (mean - c)
    c <- c + v                                      (nesterov: c <- c + lr (mean - c) + momentum v)

    block momentum (BMUF; Chen and Huo, 2016)   outer_momentum=0.9; outer_lr is the block learning rate
    ... with its look-ahead (Nesterov)          outer_momentum=0.9, nesterov=true
    DiLoCo (Douillard and others, 2023)         period=500, outer_lr=0.7, outer_momentum=0.9, nesterov=true

All are torch's SGD with momentum, with the gradient c - mean. With nesterov, c is the look-ahead point from
which workers continue. outer_lr=1 without momentum gives the mean itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from echelon.errors import ConfigError
from echelon.sync.families.mix import Average, Averaging, MixPolicy
from echelon.sync.policies.full import Full
from echelon.sync.policy import ClusterInfo, Policy

if TYPE_CHECKING:
    from torch import Tensor

_PERIOD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(MixPolicy):
    """Each worker takes `period` steps of its own, then all average their weights.

    `periods` are the period inside groups and the period among all. outer_lr, outer_momentum and nesterov
    give block momentum (BMUF) or the outer optimizer of DiLoCo.
    """

    name: ClassVar[str] = "local"
    period: int = _PERIOD
    periods: tuple[int, ...] | None = None
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(
                f"workers cannot average every {self.period} steps", where="period", fix="give 1 or more"
            )
        if self.periods is not None:
            self._check_periods(self.periods)
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise ConfigError(
                f"outer_lr is {self.outer_lr:g}, but must be a number above 0",
                where="outer_lr",
                fix="give 1 for the mean itself, 0.7 as DiLoCo does",
            )
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"outer_momentum is {self.outer_momentum:g}, but must be in [0, 1)",
                where="outer_momentum",
                fix="give 0 for none, 0.9 as DiLoCo does",
            )
        if self.nesterov and not self.outer_momentum:
            raise ConfigError(
                "nesterov needs momentum, but outer_momentum is 0",
                where="nesterov",
                fix="add outer_momentum=0.9, or leave nesterov out",
            )

    def _check_periods(self, periods: tuple[int, ...]) -> None:
        if len(periods) != 2:
            raise ConfigError(
                f"{len(periods)} periods are given, but there are two levels",
                where="periods",
                fix="give the steps between averages inside a group and among all, such as periods=[4, 16]",
            )
        inner, outer = periods
        if inner < 1 or outer <= inner or outer % inner:
            raise ConfigError(
                f"the period among all, {outer}, is not a larger multiple of that inside groups, {inner}",
                where="periods",
                fix="give 1 or more and a larger multiple of it, such as periods=[4, 16]",
            )
        if self.period not in (_PERIOD, outer):
            raise ConfigError(
                "both period and periods are given", where="period, periods", fix="give one of the two"
            )

    @property
    def _global_period(self) -> int:
        return self.periods[-1] if self.periods else self.period

    @property
    def _has_outer_step(self) -> bool:
        return self.outer_lr != 1 or self.outer_momentum != 0

    @property
    def shown(self) -> Literal["mean", "own", "center"]:  # type: ignore[override]
        """The center if there is an outer step, else the mean."""
        return "center" if self._has_outer_step else "mean"

    def resolved(self) -> Policy:
        """Full if the mean is taken after every step."""
        return Full() if self._global_period == 1 and not self._has_outer_step else self

    def check(self, cluster: ClusterInfo) -> None:
        """Two levels need groups that contain each worker once."""
        if self.periods is None:
            return
        if len(cluster.groups) < 2:
            raise ConfigError(
                "periods for two levels are given, but the workers are not in groups",
                where="--sync local, periods",
                fix=f"give the plan two groups or more, or one period: local({self._global_period})",
            )
        grouped = sorted(rank for group in cluster.groups for rank in group)
        if grouped != list(range(cluster.workers)):
            raise ConfigError(
                f"the groups contain workers {grouped}, but there are {cluster.workers} workers",
                where="--sync local, periods",
                fix="put each worker in exactly one group",
            )

    def averaging(self, step: int, rank: int, cluster: ClusterInfo) -> Averaging | None:
        """All workers, or the worker's group, when the period of either has passed."""
        if (step + 1) % self._global_period == 0:
            return Average(tuple(range(cluster.workers)))
        if self.periods is None or (step + 1) % self.periods[0]:
            return None
        group = next(group for group in cluster.groups if rank in group)
        group = tuple(one for one in group if one not in cluster.absent)
        return Average(group) if len(group) > 1 else None

    def start(self, own: Tensor, memory: dict[str, Tensor]) -> None:
        """Start the center at the initial weights."""
        if self._has_outer_step:
            memory["center"] = own.clone()
            memory["velocity"] = own.new_zeros(own.shape)

    def settle(
        self, own: Tensor, mean: Tensor, memory: dict[str, Tensor], average: Average, cluster: ClusterInfo
    ) -> None:
        """Take the mean, or the outer step's center; inside a group always the mean."""
        if not self._has_outer_step or len(average.members) < cluster.workers:
            own.copy_(mean)
            return
        center, velocity = memory["center"], memory["velocity"]
        change = (mean - center).mul_(self.outer_lr)
        velocity.mul_(self.outer_momentum).add_(change)
        center.add_(change.add_(velocity, alpha=self.outer_momentum) if self.nesterov else velocity)
        own.copy_(center)
