"""Replicas: each has the model, and its share of every batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.parallel.dimension import Dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas(Dimension):
    """Replicas of the model, each with its share of every batch; 0: as many as workers are left."""

    name: ClassVar[str] = "data"
    replicas: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ConfigError(
                f"replicas is {self.replicas}",
                where="data, replicas",
                fix="give at least 1, or leave it out",
            )

    @property
    def extent(self) -> int:
        """The number of replicas."""
        return self.replicas
