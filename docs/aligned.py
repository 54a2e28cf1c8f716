"""For the site: lists in docstrings whose columns are aligned by spaces become Markdown lists.

name  what the run's folder is called      becomes      - `name`: what the run's folder is called
seed  fixes the order of the data                       - `seed`: fixes the order of the data
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Docstring, Extension, Object

_ROW = re.compile(r"^(\S+(?:, \S+)*) {2,}(\S.*)$")


class Aligned(Extension):
    """Changes docstrings before the site shows them; the source stays as it is."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring, if there is one."""
        if isinstance(obj.docstring, Docstring):
            obj.docstring.value = as_lists(obj.docstring.value)


def as_lists(text: str) -> str:
    """The text with two aligned lines or more, one after the other, as a list."""
    lines = text.split("\n")
    rows = [_ROW.match(line) is not None for line in lines]
    out: list[str] = []
    for index, line in enumerate(lines):
        match = _ROW.match(line)
        neighbour = any(rows[i] for i in (index - 1, index + 1) if 0 <= i < len(rows))
        if match is None or not neighbour:
            out.append(line)
            continue
        if index and not rows[index - 1] and lines[index - 1].strip():
            out.append("")
        out.append(f"- `{match[1]}`: {match[2]}")
    return "\n".join(out)
