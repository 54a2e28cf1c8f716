"""AlexNet, in the one-tower form of Krizhevsky, "One weird trick for parallelizing CNNs", 2014."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model, is_images
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import torch

_SMALLEST = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class AlexNet(Model):
    """AlexNet for 224 x 224 colour images (Krizhevsky, 2014); 61,100,840 parameters for 1,000 classes.

    Five convolutions and three linear layers, which hold most parameters. Layers have the usual names
    (features, classifier). Other sizes from 63 x 63 are pooled to 6 x 6.
    """

    name: ClassVar[str] = "alexnet"
    takes: ClassVar[str] = "colour images (3 x height x width, float32) of 63 x 63 or more, to classify"
    fits: ClassVar[tuple[str, ...]] = ("image-folder",)

    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_range("model alexnet", "dropout", self.dropout, least=0, most=1)

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Features, pooling to 6 x 6, classifier."""
        from torch import nn

        if not is_images(sample) or sample.shape[0] != 3 or min(sample.shape[1:]) < _SMALLEST:
            raise self.misfit(sample)
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)]
        classifier = nn.Sequential(
            nn.Dropout(self.dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(self.dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, sample.classes),
        )
        return nn.Sequential(
            OrderedDict(
                features=nn.Sequential(*layers),
                avgpool=nn.AdaptiveAvgPool2d(6),
                flatten=nn.Flatten(),
                classifier=classifier,
            )
        )
