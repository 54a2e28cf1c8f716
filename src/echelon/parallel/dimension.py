"""The contract of a dimension of a layout: one way in which a model is spread over workers.

A layout is a product of dimensions (`layout.py`). Each says over how many workers it goes, and what it
cannot be combined with.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from echelon.config.registry import Registry, Strategy


class Dimension(Strategy):
    """One factor of a layout. Holds only its options."""

    __slots__ = ()
    least: ClassVar[int] = 1

    @property
    @abstractmethod
    def extent(self) -> int:
        """Over how many workers it goes; 0: over all that the other dimensions leave."""


# mypy cannot take an abstract class as a value; the registry never instantiates the contract.
DIMENSIONS: Registry[Dimension] = Registry(
    "parallel",
    Dimension,  # type: ignore[type-abstract]
    "echelon.parallel.strategies",
)
