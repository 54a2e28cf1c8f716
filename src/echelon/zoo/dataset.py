"""The contract of a data set: it loads two splits, and describes their samples.

A strategy file imports numpy, torch and the like inside `load`, so that listing data sets is fast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from echelon.config.registry import Registry, Strategy

if TYPE_CHECKING:
    from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """The description of one sample, without the batch dimension; enough to build a model for it.

    Task "classify": one target per sample. Task "next-token": one target per position, and `classes`
    is the size of the vocabulary.
    """

    shape: tuple[int, ...]
    dtype: Literal["float32", "int64"]
    classes: int
    task: Literal["classify", "next-token"]

    def __str__(self) -> str:
        size = " x ".join(str(n) for n in self.shape)
        return f"{size} {self.dtype}, {self.classes} classes, {self.task}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """A loaded data set. Loaders take `collate` as their `collate_fn`; None means torch's own."""

    train: Dataset[Any]
    test: Dataset[Any]
    spec: SampleSpec
    collate: Callable[[Any], Any] | None = None


class Data(Strategy):
    """A data set: its fields are its options, and `load` reads or makes it."""

    __slots__ = ()

    @abstractmethod
    def load(self) -> Splits:
        """Both splits as map-style torch data sets. Raises DataError if files are missing or damaged."""


# mypy does not accept an abstract class as a value; the registry never instantiates it.
DATASETS: Registry[Data] = Registry("data", Data, "echelon.zoo.datasets")  # type: ignore[type-abstract]
