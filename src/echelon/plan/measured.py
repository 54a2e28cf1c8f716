"""What a probe measured between nodes: pairs alone, and sets of flows at the same time.

Rates are bytes per second of payload, as the receiver counted them. Latencies are one way; a probe that can
only time a round trip gives half of it. `plan/sites.py` finds sites, links and shared uplinks in these.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from echelon.errors import ConfigError

Flow = tuple[str, str]  # the names of the sender and the receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMeasured:
    """One node sends to another, and nobody else does.

    latency_s    one way, for a message of a few bytes
    bytes_per_s  for a long message
    """

    sender: str
    receiver: str
    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        where = f"measured from {self.sender} to {self.receiver}"
        if self.sender == self.receiver:
            raise ConfigError(f"{self.sender} is both ends of a link", where=where, fix="measure two nodes")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ConfigError(
                f"a latency of {self.latency_s} s",
                where=where,
                fix="measure it again, or leave the pair out",
            )
        _check_rate(self.bytes_per_s, where)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowsMeasured:
    """Several flows at the same time, and the rate that each of them got."""

    flows: tuple[Flow, ...]
    bytes_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        where = f"measured flows {', '.join(f'{sender} to {receiver}' for sender, receiver in self.flows)}"
        if len(self.flows) != len(self.bytes_per_s):
            raise ConfigError(
                f"{len(self.flows)} flows have {len(self.bytes_per_s)} rates",
                where=where,
                fix="give one rate for each flow",
            )
        for rate in self.bytes_per_s:
            _check_rate(rate, where)


def _check_rate(bytes_per_s: float, where: str) -> None:
    if not (math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise ConfigError(
            f"a rate of {bytes_per_s} bytes per second",
            where=where,
            fix="check that the nodes reach each other, or leave the slower one out",
        )
