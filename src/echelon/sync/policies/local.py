"""Local steps: each worker takes k steps of its own, then all average their weights.

Two levels: `periods=[4, 16]` averages inside a worker's group after every 4 steps, and among all after
every 16; where both are due, among all only.

An outer step makes more of a meeting of all than taking the mean. It sees the way from the weights that all
had after the meeting before, the center c, to the mean, as a step that momentum can be given to:

    v <- momentum v + lr (mean - c)
    c <- c + v                                      (nesterov: c <- c + lr (mean - c) + momentum v)

    block momentum (BMUF; Chen and Huo, 2016)   outer_momentum=0.9; outer_lr is the block learning rate
    ... with its look-ahead (Nesterov)          outer_momentum=0.9, nesterov=true
    DiLoCo (Douillard and others, 2023)         period=500, outer_lr=0.7, outer_momentum=0.9, nesterov=true

They are one: SGD with momentum, as torch has it, whose gradient is c - mean. With nesterov c is the point
ahead from which workers go on. outer_lr=1 without momentum is the mean itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from echelon.errors import ConfigError
from echelon.sync.families.mix import Average, Meeting, MixPolicy
from echelon.sync.policies.full import Full
from echelon.sync.policy import ClusterInfo, Policy

if TYPE_CHECKING:
    from torch import Tensor

_PERIOD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Local(MixPolicy):
    """Each worker takes `period` steps of its own, then all average their weights.

    `periods` are those inside groups and among all; outer_lr, outer_momentum and nesterov make block
    momentum (BMUF) or the outer optimizer of DiLoCo.
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
                f"workers cannot meet every {self.period} steps", where="period", fix="give 1 or more"
            )
        if self.periods is not None:
            self._check_periods(self.periods)
        if not (self.outer_lr > 0 and math.isfinite(self.outer_lr)):
            raise ConfigError(
                f"outer_lr is {self.outer_lr:g}, it has to be a number above 0",
                where="outer_lr",
                fix="give 1 for the mean itself, 0.7 as DiLoCo does",
            )
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(
                f"outer_momentum is {self.outer_momentum:g}, it has to be in [0, 1)",
                where="outer_momentum",
                fix="give 0 for none, 0.9 as DiLoCo does",
            )
        if self.nesterov and not self.outer_momentum:
            raise ConfigError(
                "nesterov looks ahead along a momentum, and there is none",
                where="nesterov",
                fix="add outer_momentum=0.9, or leave nesterov out",
            )

    def _check_periods(self, periods: tuple[int, ...]) -> None:
        if len(periods) != 2:
            raise ConfigError(
                f"{len(periods)} periods are given, there are two levels",
                where="periods",
                fix="give the steps between meetings inside a group and among all, such as periods=[4, 16]",
            )
        inner, outer = periods
        if inner < 1 or outer <= inner or outer % inner:
            raise ConfigError(
                f"{outer} is no multiple of {inner}, or not a larger one",
                where="periods",
                fix="give 1 or more and a multiple of it, such as periods=[4, 16]",
            )
        if self.period not in (_PERIOD, outer):
            raise ConfigError(
                "both period and periods are given", where="period, periods", fix="give one of the two"
            )

    @property
    def _of_all(self) -> int:
        return self.periods[-1] if self.periods else self.period

    @property
    def _steps_outside(self) -> bool:
        return self.outer_lr != 1 or self.outer_momentum != 0

    @property
    def shown(self) -> Literal["mean", "own", "center"]:  # type: ignore[override]
        """What the outer step makes is the model; without one it is the mean."""
        return "center" if self._steps_outside else "mean"

    def resolved(self) -> Policy:
        """The mean after every step is full synchronisation."""
        return Full() if self._of_all == 1 and not self._steps_outside else self

    def check(self, cluster: ClusterInfo) -> None:
        """Two levels need groups, each worker in one of them."""
        if self.periods is None:
            return
        if len(cluster.groups) < 2:
            raise ConfigError(
                "periods for two levels are given, and the workers are not in groups",
                where="--sync local, periods",
                fix=f"give the plan two groups or more, or one period: local({self._of_all})",
            )
        grouped = sorted(rank for group in cluster.groups for rank in group)
        if grouped != list(range(cluster.workers)):
            raise ConfigError(
                f"the groups hold the workers {grouped}, and there are {cluster.workers}",
                where="--sync local, periods",
                fix="put each worker in exactly one group",
            )

    def meeting(self, step: int, rank: int, cluster: ClusterInfo) -> Meeting | None:
        """All, or the worker's group, when their period is over."""
        if (step + 1) % self._of_all == 0:
            return Average(tuple(range(cluster.workers)))
        if self.periods is None or (step + 1) % self.periods[0]:
            return None
        group = next(group for group in cluster.groups if rank in group)
        return Average(group) if len(group) > 1 else None

    def start(self, own: Tensor, memory: dict[str, Tensor]) -> None:
        """The center is where all begin."""
        if self._steps_outside:
            memory["center"] = own.clone()
            memory["velocity"] = own.new_zeros(own.shape)

    def settle(
        self, own: Tensor, mean: Tensor, memory: dict[str, Tensor], meeting: Average, cluster: ClusterInfo
    ) -> None:
        """The mean, or what the outer step makes of it; inside a group always the mean."""
        if not self._steps_outside or len(meeting.members) < cluster.workers:
            own.copy_(mean)
            return
        center, velocity = memory["center"], memory["velocity"]
        way = (mean - center).mul_(self.outer_lr)
        velocity.mul_(self.outer_momentum).add_(way)
        center.add_(way.add_(velocity, alpha=self.outer_momentum) if self.nesterov else velocity)
        own.copy_(center)
