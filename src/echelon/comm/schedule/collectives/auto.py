"""Auto: the collective that the cost model finds cheapest for this group, this length and these links.

Small buffers want few steps, large ones few bytes (`comm/cost.py` has the formulas); two workers exchange
directly. The choice follows from the options alone, so members that agree on them choose alike: a group
that has measured its links passes them in (`AutoCollective.measured`); others assume a 1 Gb/s network.
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
# What a message costs the software at both ends, however long the way: the loop wakes up, reads the header,
# finds the receiver. Further messages of a step cost this, for their ways overlap.
_MESSAGE_S = 60e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoCollective(Collective):
    """The cheapest for the number of workers, the length and the links.

    `latency_s` is what a step costs beside its bytes, software and wire; `bytes_per_s` what a link carries;
    `reduce_bytes_per_s` how fast a worker adds.
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
        """With what was found about the slowest link, to three digits: no measurement has more."""
        latency_s = float(f"{link.latency_s:.3g}")
        if not link.seconds_per_byte:
            return cls(latency_s=latency_s)
        return cls(latency_s=latency_s, bytes_per_s=float(f"{1 / link.seconds_per_byte:.3g}"))

    def __str__(self) -> str:
        """As it is written on the command line."""
        return str(Call(self.name, (), dataclasses.asdict(self)))

    @property
    def link(self) -> LinkCost:
        """What the cost model is asked with."""
        return LinkCost(
            latency_s=self.latency_s,
            seconds_per_byte=1 / self.bytes_per_s,
            message_s=min(self.latency_s, _MESSAGE_S),
        )

    def schedule(self, rank: int, size: int, length: int) -> Schedule:
        """The chosen collective's schedule."""
        return COLLECTIVES.build(self.choose(size, length)).schedule(rank, size, length)

    def choose(self, size: int, length: int) -> str:
        """The name of the collective that would be used for so many elements."""
        return _chosen(self, size, length * _ITEM_BYTES)[0]

    def reason(self, size: int, length_bytes: int) -> str:
        """A sentence for the plan: what would be used for so many bytes, and why."""
        why = _chosen(self, size, length_bytes)[1]
        return f"{why}, at {show_bytes(self.bytes_per_s)}/s and {show_seconds(self.latency_s)} a step"


@lru_cache(maxsize=1024)
def _chosen(auto: AutoCollective, size: int, length_bytes: int) -> tuple[str, str]:
    """The name and the reason."""
    name, _, why = choose(size, length_bytes, auto.link, 1 / auto.reduce_bytes_per_s, _ITEM_BYTES)
    return name, why
