"""Asynchronous: the server applies each gradient on arrival, and the worker continues at once.

Nobody waits, but other workers may have changed the weights since a gradient was computed. Each gradient is
applied in full, so with N workers the weights move N times per global batch: learning rates that suit
`full` are often too large here.
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
        """A rule without state."""
        return _AsyncRule()


class _AsyncRule(Rule):
    def arrive(self, arrival: Arrival) -> list[Decision]:
        return [Apply((WeightedPush(arrival.worker, arrival.step, 1.0),)), Release(arrival.worker)]
