"""A small convolutional network, for images of about 32 x 32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model, is_images
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cnn(Model):
    """A small CNN for 32 x 32 colour images, three convolutions; 188,810 parameters on cifar10.

    3 x 3 convolutions of w, 2w and 2w channels, each followed by ReLU and max pooling by 2, then 4w
    and `classes` units. There are no normalisation layers, so that a batch can be split freely.
    """

    name: ClassVar[str] = "cnn"
    takes: ClassVar[str] = "images (channels x height x width, float32) of 8 x 8 to 64 x 64, to classify"
    fits: ClassVar[tuple[str, ...]] = ("cifar10", "mnist", "fashion-mnist", "digits")

    width: int = 32

    def __post_init__(self) -> None:
        check_range("model cnn", "width", self.width, least=1)

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Three times convolution and pooling, then two linear layers."""
        from torch import nn

        if not is_images(sample) or not all(8 <= side <= 64 for side in sample.shape[1:]):
            raise self.misfit(sample)
        channels, height, width = sample.shape
        layers: list[nn.Module] = []
        for out in (self.width, 2 * self.width, 2 * self.width):
            layers += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = out
        return nn.Sequential(
            *layers,
            nn.Flatten(),
            nn.Linear(channels * (height // 8) * (width // 8), 4 * self.width),
            nn.ReLU(),
            nn.Linear(4 * self.width, sample.classes),
        )
