"""VGG-16: Simonyan and Zisserman, "Very deep convolutional networks for image recognition", 2015."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model, is_images
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import torch

_CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_SMALLEST = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Vgg16(Model):
    """VGG-16 for 224 x 224 colour images (Simonyan, 2015); 138,357,544 parameters for 1,000 classes.

    The paper's configuration D: thirteen 3 x 3 convolutions and three linear layers. Other sizes from
    32 x 32 are pooled to 7 x 7. Convolutions start from He's normal distribution, linear layers from
    a deviation of 0.01: sixteen layers without normalisation do not learn from torch's default.
    """

    name: ClassVar[str] = "vgg16"
    takes: ClassVar[str] = "colour images (3 x height x width, float32) of 32 x 32 or more, to classify"
    fits: ClassVar[tuple[str, ...]] = ("image-folder", "cifar10")

    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_range("model vgg16", "dropout", self.dropout, least=0, most=1)

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Features, pooling to 7 x 7, classifier."""
        from torch import nn

        if not is_images(sample) or sample.shape[0] != 3 or min(sample.shape[1:]) < _SMALLEST:
            raise self.misfit(sample)
        layers: list[nn.Module] = []
        before = 3
        for stage in _CHANNELS:
            for channels in stage:
                layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU(inplace=True)]
                before = channels
            layers.append(nn.MaxPool2d(2))
        classifier: list[nn.Module] = []
        for inputs in (512 * 7 * 7, 4096):
            classifier += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout(self.dropout)]
        module = nn.Sequential(
            OrderedDict(
                features=nn.Sequential(*layers),
                avgpool=nn.AdaptiveAvgPool2d(7),
                flatten=nn.Flatten(),
                classifier=nn.Sequential(*classifier, nn.Linear(4096, sample.classes)),
            )
        )
        module.apply(_initialise)
        return module


def _initialise(module: torch.nn.Module) -> None:
    from torch import nn

    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    else:
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)
