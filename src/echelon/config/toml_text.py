"""Reads TOML; whatever is wrong with the text, the error is a TOMLDecodeError."""

from __future__ import annotations

import tomllib
from typing import Any


def read_toml(text: str) -> dict[str, Any]:
    """The tables of a text. Python's parser calls itself for each bracket, and fails in its own way."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("brackets are nested too deeply") from None
