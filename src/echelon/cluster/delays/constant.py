"""The same pause every time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import ClassVar

from echelon.cluster.delay import Delay, check


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Delay):
    """The same pause every time."""

    name: ClassVar[str] = "constant"
    seconds: float

    def __post_init__(self) -> None:
        check(self, "seconds", low=0)

    def sample(self, rng: random.Random) -> float:
        """The pause itself."""
        return self.seconds
