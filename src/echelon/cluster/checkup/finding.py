"""The result of one check.

A finding is ok, a note (something works less well, or not at all, but plain training is unaffected) or a
problem (training would fail). Notes and problems carry a fix if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    level: Level
    topic: str
    subject: str
    text: str
    fix: str = ""
