"""The user's function that a text names as "module:name".

It is imported only if the user of this process named it (allowed.py): a plan's file or a message cannot
make a process import anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from echelon.config.allowed import check_allowed
from echelon.errors import ConfigError


def check_target(target: str, *, where: str, example: str) -> None:
    """Raise ConfigError unless the text has the form module:name."""
    module, _, attribute = target.partition(":")
    if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"{target!r} is not of the form module:name",
            where=where,
            fix=f"give the module and the name of a function: {example}",
        )


@lru_cache(maxsize=64)
def named_function(target: str, *, where: str, of: str) -> Callable[..., Any]:
    """Import the function; `of` says in words what it is given."""
    check_allowed(target, f"function {target}", where=where)
    module, _, attribute = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigError(
            f"{target} cannot be imported: {type(error).__name__}: {error}",
            where=where,
            fix="name a function in a module that Python can import on every machine",
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{target} is not a function but of type {type(found).__name__}",
            where=where,
            fix=f"name a function of {of}",
        )
    return found  # type: ignore[no-any-return]
