"""Finds questions to the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal(AdaptRule):
    """Calls of input(): only the leader has the terminal's input."""

    name: ClassVar[str] = "terminal"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call."""
        for call in reading.tree.calls("input", "getpass.getpass"):
            what = f"{reading.source(call.func)}() asks at the terminal"
            why = "under echelon run only the leader has the terminal's input; the others get an EOFError"
            fix = "take the answer from an option of the command line"
            yield reading.say(self.name, call, "check", what, why, fix)
