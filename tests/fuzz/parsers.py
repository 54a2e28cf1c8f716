"""Every parser that reads bytes of another process, or of a file that somebody else may have written."""

from __future__ import annotations

from fuzz.file_parsers import file_parsers
from fuzz.parser import Parser
from fuzz.wire_parsers import wire_parsers


def parsers() -> dict[str, Parser]:
    """By name."""
    found = [*wire_parsers(), *file_parsers()]
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}
