"""Elastic averaging (EASGD): workers train by themselves, tied to a center by a spring.

`echelon.sync.families.elastic` has the formulas and both forms. The variant with momentum, EAMSGD, needs
only Nesterov momentum in each worker's own optimizer: SGD(momentum=0.9, nesterov=True).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.elastic import AsynchronousElastic, SynchronousElastic
from echelon.sync.policy import ClusterInfo, Family, Policy

_ALPHA = 0.1  # default of the asynchronous form, which is stable with any alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticAveraging(Policy):
    """Workers and a center are pulled towards each other by `alpha`, after every `period` steps.

    All workers at once, or, if asynchronous, each worker with a server's weights. The default of alpha is
    0.9 / N for N workers, or 0.1 if asynchronous. For momentum, give it to the worker's optimizer.
    """

    name: ClassVar[str] = "elastic-averaging"
    family: ClassVar[Family] = "mix"
    alpha: float | None = None
    period: int = 4
    asynchronous: bool = False

    def __post_init__(self) -> None:
        if self.alpha is not None and not 0 < self.alpha < 1:
            raise ConfigError(
                f"alpha is {self.alpha:g}, but must be between 0 and 1",
                where="alpha",
                fix="give a fraction of the distance from worker to center, such as 0.1, or leave it out",
            )
        if self.period < 1:
            raise ConfigError(
                f"workers cannot average every {self.period} steps", where="period", fix="give 1 or more"
            )

    def resolved(self) -> SynchronousElastic | AsynchronousElastic:
        """One of the two forms."""
        if not self.asynchronous:
            return SynchronousElastic(alpha=self.alpha, period=self.period)
        return AsynchronousElastic(alpha=_ALPHA if self.alpha is None else self.alpha, period=self.period)

    def check(self, cluster: ClusterInfo) -> None:
        """Checks the chosen form."""
        self.resolved().check(cluster)
