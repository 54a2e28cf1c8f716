"""The contract of a model: it builds a torch module for a given kind of sample.

Logits have the classes in the last dimension. A strategy file imports torch inside `build`, so that listing
models is fast.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from echelon.config.registry import Registry, Strategy
from echelon.errors import ConfigError
from echelon.zoo.dataset import SampleSpec

if TYPE_CHECKING:
    import torch


class Model(Strategy):
    """A model: its fields are its options; `takes` describes suitable samples, `fits` names data sets."""

    __slots__ = ()
    takes: ClassVar[str] = "other samples"
    fits: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """A new module with torch's current random state; ConfigError if the sample is not suitable."""

    def misfit(self, sample: SampleSpec) -> ConfigError:
        """The error for a sample that this model does not take."""
        fix = f"data sets that fit: {', '.join(self.fits)}" if self.fits else "choose other data"
        return ConfigError(
            f"{self.name} takes {self.takes}; these samples are {sample}",
            where=f"model {self.name}",
            fix=fix,
        )


def is_images(sample: SampleSpec) -> bool:
    """Whether the samples are images to classify: channels x height x width, float32."""
    return sample.task == "classify" and sample.dtype == "float32" and len(sample.shape) == 3


def is_tokens(sample: SampleSpec) -> bool:
    """Whether the samples are sequences of tokens, each to be predicted from those before it."""
    return sample.task == "next-token" and sample.dtype == "int64" and len(sample.shape) == 1


# mypy does not accept an abstract class as a value; the registry never instantiates it.
MODELS: Registry[Model] = Registry("model", Model, "echelon.zoo.models")  # type: ignore[type-abstract]
