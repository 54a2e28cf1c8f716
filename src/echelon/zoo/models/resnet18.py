"""ResNet-18: He, Zhang, Ren and Sun, "Deep residual learning for image recognition", 2016."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model, is_images

if TYPE_CHECKING:
    import torch

_SMALLEST = 16
_SMALL_STEM_UP_TO = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNet18(Model):
    """ResNet-18 (He et al., 2016), with a stem by image size; 11,689,512 parameters for 1,000 classes.

    Images above 64 x 64 get the paper's stem (7 x 7 convolution of stride 2, pooling); smaller ones get a
    3 x 3 convolution of stride 1 without pooling, as usual for 32 x 32: 11,173,962 parameters for 10
    classes of colour images. Layers have the usual names, the same for both stems. BatchNorm follows each
    convolution.
    """

    name: ClassVar[str] = "resnet18"
    takes: ClassVar[str] = "images (channels x height x width, float32) of 16 x 16 or more, to classify"
    fits: ClassVar[tuple[str, ...]] = ("image-folder", "cifar10", "mnist", "fashion-mnist")

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Stem, four layers of two blocks, average over the image, one linear layer."""
        from torch import nn

        from echelon.zoo.layers import BasicBlock

        if not is_images(sample) or min(sample.shape[1:]) < _SMALLEST:
            raise self.misfit(sample)
        parts = self._stem(sample)
        before = 64
        for number, channels in enumerate((64, 128, 256, 512), start=1):
            first = BasicBlock(before, channels, stride=1 if number == 1 else 2)
            parts[f"layer{number}"] = nn.Sequential(first, BasicBlock(channels, channels, stride=1))
            before = channels
        parts["avgpool"] = nn.AdaptiveAvgPool2d(1)
        parts["flatten"] = nn.Flatten()
        parts["fc"] = nn.Linear(before, sample.classes)
        module = nn.Sequential(parts)
        for part in module.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        return module

    def _stem(self, sample: SampleSpec) -> OrderedDict[str, torch.nn.Module]:
        from torch import nn

        small = max(sample.shape[1:]) <= _SMALL_STEM_UP_TO
        kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        stem: OrderedDict[str, nn.Module] = OrderedDict()
        stem["conv1"] = nn.Conv2d(sample.shape[0], 64, kernel, stride, padding, bias=False)
        stem["bn1"] = nn.BatchNorm2d(64)
        stem["relu"] = nn.ReLU(inplace=True)
        if not small:
            stem["maxpool"] = nn.MaxPool2d(3, 2, padding=1)
        return stem
