"""Delay compensation: async, with gradients corrected for the updates made since they were computed.

A gradient g was computed on the weights r that the worker read; the server's weights are now w. To first
order the gradient at w is g + H (w - r), and the diagonal of g g^T approximates the Hessian H:

    g + lambda g * g * (w - r)              element by element

DC-ASGD of Zheng et al. (2017), "Asynchronous Stochastic Gradient Descent with Delay Compensation". lambda
is `strength`; adaptive (DC-ASGD-a), strength / sqrt(m + 1e-7) with m <- decay m + (1 - decay) g * g,
from 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.serve import Rule, ServePolicy, needs_server
from echelon.sync.policies.asynchronous import Async
from echelon.sync.policy import ClusterInfo

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_SQUARE = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayCompensated(ServePolicy):
    """Like async, with gradients corrected for the delay (DC-ASGD)."""

    name: ClassVar[str] = "delay-compensated"
    amends: ClassVar[bool] = True
    strength: float = 0.04
    adaptive: bool = False
    decay: float = 0.95

    def __post_init__(self) -> None:
        if not (math.isfinite(self.strength) and self.strength >= 0):
            raise ConfigError(
                f"strength is {self.strength:g}, but must be 0 or more",
                where="sync delay-compensated, strength",
                fix="give 0 for plain async, 0.04 as a start, about 1 if adaptive",
            )
        if not 0 <= self.decay < 1:
            raise ConfigError(
                f"decay is {self.decay:g}, but must be at least 0 and below 1",
                where="sync delay-compensated, decay",
                fix="give 0.95 to average over about the last 20 gradients",
            )

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server."""
        needs_server(self, cluster)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """The rule of async."""
        return Async().rule(cluster)

    def amend(self, gradient: Tensor, weights: Tensor, read: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """The approximate gradient at `weights`, from the one computed on `read`."""
        square = gradient * gradient
        change = square * (weights - read)
        if not self.adaptive:
            return gradient.add(change, alpha=self.strength)
        if "square" not in memory:
            memory["square"] = square.new_zeros(square.shape)
        average = memory["square"].mul_(self.decay).add_(square, alpha=1 - self.decay)
        return gradient.addcdiv(change, average.add(_LEAST_SQUARE).sqrt_(), value=self.strength)
