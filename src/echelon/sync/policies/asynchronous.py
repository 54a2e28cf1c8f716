"""Asynchronous: the server applies each gradient when it arrives, and the worker goes on at once.

Nobody waits, and gradients are computed on weights that others have changed meanwhile. Each gradient is
applied whole, so with N workers the weights move N times per batch of all of them: learning rates that
suit `full` are often too large here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
class Async(ServePolicy):
    """The server applies each gradient on arrival; nobody waits."""

    name: ClassVar[str] = "async"

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server."""
        needs_server(self, cluster)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """Nothing to remember."""
        return _Immediately()


class _Immediately(Rule):
    def arrive(self, arrival: Arrival) -> list[Decision]:
        return [Apply((WeightedPush(arrival.worker, arrival.step, 1.0),)), Release(arrival.worker)]
