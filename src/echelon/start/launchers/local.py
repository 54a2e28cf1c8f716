"""This machine: the launcher starts the workers itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.start.agents.driver import ConnectedAgent
from echelon.start.launcher import Launcher, Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class ThisMachine(Launcher):
    """This machine, the default: the workers are processes of the launcher's own."""

    name: ClassVar[str] = "local"

    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """No agent."""
        return []
