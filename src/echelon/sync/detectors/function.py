"""A user's function of past times, given as "module:name".

The function takes a worker's own past times and a list of the others', in seconds, oldest first, and
returns the longest time that is normal. It is imported only if the user of this process named it
(config/allowed.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, SupportsFloat

from echelon.config.named_function import check_target, named_function
from echelon.errors import ConfigError
from echelon.sync.detector import Detector, check_kept

_WHERE = "detector function, target"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitFunction(Detector):
    """Slow: longer than your function of the past times says, target="module:name"."""

    name: ClassVar[str] = "function"
    target: str
    after: int = 3

    def __post_init__(self) -> None:
        check_target(self.target, where=_WHERE, example='function(target="my_module:limit")')
        check_kept(self, "after")
        _load(self.target)

    def limit(self, own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
        """The function's value; no limit before `after` times are known."""
        if len(own) < self.after:
            return math.inf
        try:
            found = float(_load(self.target)(list(own), [list(one) for one in others]))
        except Exception as error:
            raise ConfigError(
                f"{self.target} failed: {type(error).__name__}: {error}",
                where=_WHERE,
                fix="use a function of a list of times and a list of such lists, that returns seconds",
            ) from error
        if math.isnan(found):
            raise ConfigError(
                f"{self.target} returned NaN",
                where=_WHERE,
                fix="return the longest normal time in seconds; float('inf') if nobody is slow",
            )
        return found


def _load(target: str) -> Callable[..., SupportsFloat]:
    return named_function(target, where=_WHERE, of="a worker's past times, and the others'")
