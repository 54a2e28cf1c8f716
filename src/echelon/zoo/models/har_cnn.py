"""A 1-D convolutional network for human activity recognition.

Hasheminezhad et al., "Towards a scalable and distributed infrastructure for deep learning applications",
measure "a 4-layers CNN on a Human Activity Recognition data" and give no widths; these widths are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import Model
from echelon.zoo.options import check_range

if TYPE_CHECKING:
    import torch

_LAYERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HarCnn(Model):
    """A 4-layer 1-D CNN for activity windows of 9 channels and 128 steps; 41,926 parameters.

    Four times: convolution over 3 steps, ReLU, max pooling by 2; then dropout and one linear layer.
    """

    name: ClassVar[str] = "har-cnn"
    takes: ClassVar[str] = "windows (channels x steps, float32) of 16 steps or more, to classify"
    fits: ClassVar[tuple[str, ...]] = ("activity",)

    width: int = 64
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_range("model har-cnn", "width", self.width, least=1)
        check_range("model har-cnn", "dropout", self.dropout, least=0, most=1)

    def build(self, sample: SampleSpec) -> torch.nn.Module:
        """Four convolutions with pooling, then a linear layer."""
        from torch import nn

        windows = sample.task == "classify" and sample.dtype == "float32" and len(sample.shape) == 2
        if not windows or sample.shape[1] < 2**_LAYERS:
            raise self.misfit(sample)
        channels, steps = sample.shape
        layers: list[nn.Module] = []
        for _ in range(_LAYERS):
            layers += [nn.Conv1d(channels, self.width, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2)]
            channels, steps = self.width, steps // 2
        head = nn.Linear(channels * steps, sample.classes)
        return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(self.dropout), head)
