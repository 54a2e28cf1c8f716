"""How is an edit written as a patch that `patch -p1` and `git apply` take?"""

from __future__ import annotations

import difflib

_NO_END = "\n\\ No newline at end of file\n"


def unified(before: str, after: str, name: str) -> str:
    """The unified diff of a file; empty if nothing changed."""
    lines = difflib.unified_diff(
        _lines(before), _lines(after), fromfile=f"a/{name}", tofile=f"b/{name}", lineterm="\n"
    )
    return "".join(line if line.endswith("\n") else line + _NO_END for line in lines)


def _lines(text: str) -> list[str]:
    """Lines by `\\n` only: other characters that end lines are part of a line for a patch."""
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
