"""What is said about one thing that was looked at?

A finding is ok, a note (something works less well, or not at all, without harm to plain training) or a
problem (training would fail). Notes and problems that can be remedied say how.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    topic: str
    subject: str
    text: str
    fix: str = ""
