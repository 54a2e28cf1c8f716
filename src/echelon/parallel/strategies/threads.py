"""Replicas in the threads of a worker: each computes a part of the worker's share of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.parallel.dimension import Dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads(Dimension):
    """Replicas in the threads of each worker, which share its weights; 0: one for each torch thread."""

    name: ClassVar[str] = "threads"
    replicas: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ConfigError(
                f"replicas is {self.replicas}",
                where="threads, replicas",
                fix="give at least 1, or leave it out",
            )

    @property
    def extent(self) -> int:
        """One worker: it goes over the threads inside."""
        return 1
