"""Downpour: workers push and pull every few steps, and take steps of their own in between.

Dean et al. (2012), "Large Scale Distributed Deep Networks". A worker pushes the sum of its gradients since
its last push, and the server's optimizer applies it on arrival. Between pulls a worker updates its own
weights with its own optimizer. downpour(1, 1) is async.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.families.serve import Rule, ServePolicy, needs_server
from echelon.sync.policies.asynchronous import Async
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Downpour(ServePolicy):
    """Like async, but workers push every `push` steps and pull weights every `pull` steps."""

    name: ClassVar[str] = "downpour"
    push: int = 4
    pull: int = 4

    def __post_init__(self) -> None:
        for option, steps in (("push", self.push), ("pull", self.pull)):
            if steps < 1:
                raise ConfigError(
                    f"a worker cannot {option} every {steps} steps",
                    where=f"sync downpour, {option}",
                    fix=f"give 1 to {option} in every step, or more",
                )

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server."""
        needs_server(self, cluster)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """The rule of async."""
        return Async().rule(cluster)

    @property
    def push_every(self) -> int:
        """Every `push` steps."""
        return self.push

    @property
    def pull_every(self) -> int:
        """Every `pull` steps."""
        return self.pull
