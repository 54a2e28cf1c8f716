"""A user's function of the number of gradients, given as "module:name".

The function takes the number of gradients so far and returns K. It must never decrease, which is checked at
many points before training and at every gradient during training. It is imported only if the user of this
process named it (config/allowed.py): a plan's file or a message cannot make a process import anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, SupportsFloat

from echelon.config.allowed import check_allowed
from echelon.errors import ConfigError
from echelon.sync.threshold import Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class Function(Curve):
    """K is given by your function of the number of gradients, target="module:name"."""

    name: ClassVar[str] = "function"
    target: str

    def __post_init__(self) -> None:
        module, _, attribute = self.target.partition(":")
        if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ConfigError(
                f"{self.target!r} is not of the form module:name",
                where="threshold function, target",
                fix='give the module and the name of a function: function(target="my_module:grow")',
            )
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
                where="threshold function, target",
                fix="use a function of one integer, from 0 on, that returns a number",
            ) from error


@lru_cache(maxsize=64)
def _load(target: str) -> Callable[[int], SupportsFloat]:
    check_allowed(target, f"function {target}", where="threshold function, target")
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{target} cannot be imported: {type(error).__name__}: {error}",
            where="threshold function, target",
            fix="name a function in a module that Python can import on every machine",
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{target} is not a function but of type {type(found).__name__}",
            where="threshold function, target",
            fix="name a function of the number of gradients",
        )
    return found  # type: ignore[no-any-return]
