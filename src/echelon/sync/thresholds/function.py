"""A user's own function of the number of gradients, found as "module:name".

The function takes the number of gradients that have arrived so far and returns K; it never decreases.
That is checked at many points before training, and at every point while training goes on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, SupportsFloat

from echelon.errors import ConfigError
from echelon.sync.threshold import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Curve):
    """A function of yours, given as target="module:name"; it takes the number of gradients."""

    name: ClassVar[str] = "function"
    target: str

    def __post_init__(self) -> None:
        module, _, attribute = self.target.partition(":")
        if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(
                f"{self.target!r} names no function",
                where="threshold function, target",
                fix='give the module and the name of a function: function(target="my_module:grow")',
            )
        _load(self.target)

    def at(self, gradients: int, workers: int) -> float:
        """What the function says."""
        call = _load(self.target)
        try:
            return float(call(gradients))
        except OverflowError:
            raise  # who asks knows whether so large a number matters
        except Exception as error:
            raise ConfigError(
                f"{self.target} cannot tell K after {gradients} gradients: {type(error).__name__}: {error}",
                where="threshold function, target",
                fix="take a function of one whole number, from 0 on, that returns a number",
            ) from error


@lru_cache(maxsize=64)
def _load(target: str) -> Callable[[int], SupportsFloat]:
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{target} cannot be imported: {type(error).__name__}: {error}",
            where="threshold function, target",
            fix="name a module that Python finds on every machine, and a function in it",
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{target} is no function but {type(found).__name__}",
            where="threshold function, target",
            fix="name a function of the number of gradients",
        )
    return found  # type: ignore[no-any-return]
