"""The contract of launchers: what starts one agent on each machine of a run. See `launchers/`.

A launcher knows how to start a process on other machines and how to end it; the agents do the rest
(`agents/`): they start the workers, send back what these write, and end with their launcher.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echelon.config.registry import Registry, Strategy
from echelon.start.agents.driver import ConnectedAgent
from echelon.start.hosts import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a run needs.

    `hosts` is empty if the launcher knows the machines; `workers` 0: all slots that there are. `env` are
    variables that workers need and that nobody else may read.
    """

    workers: int
    hosts: Sequence[Host]
    timeout_s: float
    env: Mapping[str, str] = field(repr=False)


class Launcher(Strategy):
    """Starts agents. It holds only its options."""

    __slots__ = ()

    @abstractmethod
    def connect(self, wanted: Wanted) -> list[ConnectedAgent]:
        """Start one agent on each machine, in the order of ranks. After an error none is left behind.

        No agent: the launcher's own process starts the workers.
        """


# mypy does not accept an abstract class as a value; the registry never instantiates it.
LAUNCHERS: Registry[Launcher] = Registry("launcher", Launcher, "echelon.start.launchers")  # type: ignore[type-abstract]
