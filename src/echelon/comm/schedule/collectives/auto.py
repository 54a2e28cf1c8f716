"""Auto: the collective that the cost model finds cheapest for this group, this length and these links.

Small buffers need few steps, large ones few bytes (`cost.py` has the formulas); two workers exchange
directly. The choice depends on the options alone, so members with equal options make the same choice. A
group that has measured its links passes them in (`AutoCollective.measured`); others assume a 1 Gb/s
network.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from echelon.comm.schedule.collective import COLLECTIVES, Collective, Schedule
from echelon.comm.schedule.cost import LinkCost, choose
from echelon.config.call import Call
from echelon.config.units import show_bytes, show_seconds
from echelon.errors import ConfigError

_ITEM_BYTES = 4  # schedules count elements; most are float32
# Software cost of a message at both ends, independent of the link: the loop wakes up, reads the header and
# finds the receiver. Each further message of a step costs this much, because transfers overlap.
_MESSAGE_S = 60e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCollective(Collective):
    """Chooses the cheapest collective for the number of workers, the length and the links.

    `latency_s` is the cost of a step beside its bytes, software and wire; `bytes_per_s` is the bandwidth of
    a link; `reduce_bytes_per_s` is how fast a worker adds.
    """

    name: ClassVar[str] = "auto"
    latency_s: float = 100e-6
    bytes_per_s: float = 1.18e8
    reduce_bytes_per_s: float = 4e9

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not math.isfinite(value) or value < 0 or (value == 0 and field.name != "latency_s"):
                raise ConfigError(
                    f"{field.name} cannot be {value:g}",
                    where=f"collective auto, {field.name}",
                    fix="give a positive number, or leave it out",
                )

    @classmethod
    def measured(cls, link: LinkCost) -> AutoCollective:
        """With the slowest link's measured values, rounded to three digits: measurements have no more."""
        latency_s = float(f"{link.latency_s:.3g}")
        if not link.seconds_per_byte:
            return cls(latency_s=latency_s)
        return cls(latency_s=latency_s, bytes_per_s=float(f"{1 / link.seconds_per_byte:.3g}"))

    def __str__(self) -> str:
        """The text that selects this collective on the command line."""
        return str(Call(self.name, (), dataclasses.asdict(self)))

    @property
    def link(self) -> LinkCost:
        """The link costs for the cost model."""
        return LinkCost(
            latency_s=self.latency_s,
            seconds_per_byte=1 / self.bytes_per_s,
            message_s=min(self.latency_s, _MESSAGE_S),
        )

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """The chosen collective's schedule."""
        return COLLECTIVES.build(self.choose(size, length)).schedule(rank, size, length)

    def choose(self, size: int, length: int) -> str:
        """The name of the collective for a buffer of `length` elements."""
        return _chosen(self, size, length * _ITEM_BYTES)[0]

    def reason(self, size: int, length_bytes: int) -> str:
        """A sentence for the plan: the collective for a buffer of `length_bytes`, and why."""
        why = _chosen(self, size, length_bytes)[1]
        return f"{why}, at {show_bytes(self.bytes_per_s)}/s and {show_seconds(self.latency_s)} a step"


@lru_cache(maxsize=1024)
def _chosen(auto: AutoCollective, size: int, length_bytes: int) -> tuple[str, str]:
    """The chosen name and the reason."""
    name, _, why = choose(size, length_bytes, auto.link, 1 / auto.reduce_bytes_per_s, _ITEM_BYTES)
    return name, why
