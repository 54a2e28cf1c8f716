"""Replaces functions and methods for the duration of a check, and puts them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


def replace(stack: ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of the original in its place, until the stack is closed."""
    original = getattr(owner, name)
    replacement = functools.wraps(original)(make(original))
    setattr(owner, name, replacement)
    stack.callback(setattr, owner, name, original)
