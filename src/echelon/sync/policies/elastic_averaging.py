"""Elastic averaging (EASGD): workers explore by themselves, tied to a center by a spring.

Formulas and both forms: `echelon.sync.families.elastic`. The variant with momentum, EAMSGD, is Nesterov
momentum in each worker's own optimizer, SGD(momentum=0.9, nesterov=True); nothing changes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.elastic import AsynchronousElastic, SynchronousElastic
from echelon.sync.policy import ClusterInfo, Family, Policy

_ALPHA = 0.1  # of the asynchronous form, which is stable with any; 0.9 / N for nine workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticAveraging(Policy):
    """Workers and a center are pulled towards each other by `alpha`, after every `period` steps.

    All at once, or each worker when it comes (asynchronous, with a server). Without alpha it is 0.9 / N for
    N workers, or 0.1 asynchronously. With momentum: give it to the worker's optimizer.
    """

    name: ClassVar[str] = "elastic-averaging"
    family: ClassVar[Family] = "mix"
    alpha: float | None = None
    period: int = 4
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ConfigError(
                f"alpha is {self.alpha:g}, it has to be between 0 and 1",
                where="alpha",
                fix="give a part of the way between a worker and the center, such as 0.1, or leave it out",
            )
        if self.period < 1:
            raise ConfigError(
                f"workers cannot meet every {self.period} steps", where="period", fix="give 1 or more"
            )

    def resolved(self) -> SynchronousElastic | AsynchronousElastic:
        """Which of the two forms."""
        if not self.asynchronous:
            return SynchronousElastic(alpha=self.alpha, period=self.period)
        return AsynchronousElastic(alpha=_ALPHA if self.alpha is None else self.alpha, period=self.period)

    def check(self, cluster: ClusterInfo) -> None:
        """As the form does."""
        self.resolved().check(cluster)
