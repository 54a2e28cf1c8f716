"""Settings that describe themselves: `cli/options.py` makes a command's options from them."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any


def described(default: Any, help: str, *, metavar: str = "") -> Any:
    """A field of a settings class, with the help of its option; `metavar` names its value there."""
    return field(default=default, metadata={"help": help, "metavar": metavar})


def like(owner: type, name: str, help: str) -> Any:
    """A field whose default is that of the field `name` of another class."""
    defaults = {known.name: known.default for known in dataclasses.fields(owner)}
    return described(defaults[name], help)
