"""LeNet-5: LeCun et al., "Gradient-based learning applied to document recognition", 1998."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model, is_images

if TYPE_CHECKING:
    import torch

_SIDE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LeNet(Model):
    """LeNet-5 for small grey images (LeCun et al., 1998); 61,706 parameters for 10 classes.

    The paper's layers with ReLU and max pooling. Its input is 32 x 32 pixels, as in the paper: a smaller
    image is enlarged by the largest possible integer factor and padded with zeros, so that 28 x 28 gets a
    border of 2 and 8 x 8 is enlarged four times.
    """

    name: ClassVar[str] = "lenet"
    takes: ClassVar[str] = "grey images (1 x height x width, float32) of at most 32 x 32, to classify"
    fits: ClassVar[tuple[str, ...]] = ("digits", "mnist", "fashion-mnist")

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Two convolutions with pooling, then 120, 84 and `classes` units."""
        from torch import nn

        from echelon.zoo.layers import Frame

        if not is_images(sample) or sample.shape[0] != 1 or max(sample.shape[1:]) > _SIDE:
            raise self.misfit(sample)
        return nn.Sequential(
            Frame(_SIDE),
            nn.Conv2d(1, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, sample.classes),
        )
