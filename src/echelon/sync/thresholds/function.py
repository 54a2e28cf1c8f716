"""A user's function of the number of gradients, given as "module:name".

The function takes the number of gradients so far and returns K. It must never decrease, which is checked at
many points before training and at every gradient during training. It is imported only if the user of this
process named it (config/allowed.py): a plan's file or a message cannot make a process import anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, SupportsFloat

from echelon.config.named_function import check_target, named_function
from echelon.errors import ConfigError
from echelon.sync.threshold import Curve

_WHERE = "threshold function, target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Curve):
    """K is given by your function of the number of gradients, target="module:name"."""

    name: ClassVar[str] = "function"
    target: str

    def __post_init__(self) -> None:
        check_target(self.target, where=_WHERE, example='function(target="my_module:grow")')
        _load(self.target)

    def at(self, gradients: int, workers: int) -> float:
        """The function's value."""
        call = _load(self.target)
        try:
            return float(call(gradients))
        except OverflowError:
            raise  # the caller decides whether so large a number matters
        except Exception as error:
            raise ConfigError(
                f"{self.target} failed for {gradients} gradients: {type(error).__name__}: {error}",
                where=_WHERE,
                fix="use a function of one integer, from 0 on, that returns a number",
            ) from error


def _load(target: str) -> Callable[..., SupportsFloat]:
    return named_function(target, where=_WHERE, of="the number of gradients")
