"""A multilayer perceptron, for any samples that can be flattened."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp(Model):
    """A multilayer perceptron: `depth` hidden layers of `width` ReLU units, on flattened samples.

    Depth 0 is logistic regression. For n inputs and c classes it has n w + (d - 1) w² + w c weights
    and d w + c biases.
    """

    name: ClassVar[str] = "mlp"
    takes: ClassVar[str] = "float32 samples of any shape, to classify"
    fits: ClassVar[tuple[str, ...]] = (
        "generated",
        "digits",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "activity",
    )

    width: int = 128
    depth: int = 2

    def __post_init__(self) -> None:
        check_range("model mlp", "width", self.width, least=1)
        check_range("model mlp", "depth", self.depth, least=0)

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Flatten, then linear layers with ReLU between them."""
        from torch import nn

        if sample.task != "classify" or sample.dtype != "float32":
            raise self.misfit(sample)
        layers: list[nn.Module] = [nn.Flatten()]
        inputs = math.prod(sample.shape)
        for _ in range(self.depth):
            layers += [nn.Linear(inputs, self.width), nn.ReLU()]
            inputs = self.width
        return nn.Sequential(*layers, nn.Linear(inputs, sample.classes))
