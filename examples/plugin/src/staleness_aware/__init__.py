"""Asynchronous updates in which old gradients count less.

A gradient that was computed on weights `a` updates old is multiplied by (1 + a) ** -power. After Zhang and
others (2016), "Staleness-aware Async-SGD for Distributed Deep Learning".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessAware(ServePolicy):
    """Asynchronous, with a smaller weight for gradients of old weights."""

    name: ClassVar[str] = "staleness-aware"
    power: float = 1.0

    def __post_init__(self) -> None:
        if self.power < 0:
            raise ConfigError(
                f"power is {self.power:g}, it has to be 0 or more",
                where="sync staleness-aware, power",
                fix="give 0 for plain async, 1 to divide by the age",
            )

    def check(self, cluster: ClusterInfo) -> None:
        """The policy needs a parameter server."""
        needs_server(self, cluster)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """The state machine of one run."""
        return _ByAge(self.power)


class _ByAge(Rule):
    """Counts updates, and so knows the age of the weights of every gradient."""

    def __init__(self, power: float) -> None:
        self._power = power
        self._version = 0

    def arrive(self, arrival: Arrival) -> list[Decision]:
        """Apply the gradient at once, and release its worker with fresh weights."""
        age = max(0, self._version - arrival.read)
        self._version += 1
        weight = (1 + age) ** -self._power
        return [Apply((WeightedPush(arrival.worker, arrival.step, weight),)), Release(arrival.worker)]
