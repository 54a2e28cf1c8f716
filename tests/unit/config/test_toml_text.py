"""TOML that Python's own parser cannot read is a TOMLDecodeError as well."""

from __future__ import annotations

import tomllib

import pytest

from echelon.config.toml_text import read_toml


def test_brackets_nested_too_deeply_are_wrong_toml():
    with pytest.raises(tomllib.TOMLDecodeError, match="nested too deeply"):
        read_toml("a = " + "[" * 5000 + "]" * 5000)
    assert read_toml("a = [[1]]") == {"a": [[1]]}
