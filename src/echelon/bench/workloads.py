"""Which models does `echelon bench step` train, and on what batches? Random data: only time is measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from echelon.errors import UnknownName
from echelon.train.local_messages import LocalJob
from echelon.train.local_worker import TrialModel
from echelon.zoo.dataset import SampleSpec
from echelon.zoo.model import MODELS

_TOKENS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, and the batch of each worker."""

    name: str
    about: str
    batch: int
    sample: SampleSpec
    build: Callable[[SampleSpec], nn.Module]
    tokens: int = 0  # inputs are below it; 0: as many as there are classes

    def make(self, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, and a batch of inputs and targets; the same for the same seed."""
        torch.manual_seed(seed)
        spec = self.sample
        model = self.build(spec)
        shape = (self.batch, *spec.shape)
        x = (
            torch.randint(self.tokens or spec.classes, shape)
            if spec.dtype == "int64"
            else torch.randn(shape)
        )
        targets = shape if spec.task == "next-token" else shape[:1]
        return model, x, torch.randint(spec.classes, targets)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy; classes are in the last dimension."""
    return cross_entropy(model(x).flatten(0, -2), y.flatten())


class _BagOfTokens(nn.Module):
    """The mean of the tokens' embeddings, and a linear layer: most gradients are zero, and dense."""

    def __init__(self, tokens: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(tokens, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) to logits (batch, classes)."""
        return cast(Tensor, self.head(self.embedding(tokens)))


def _bag(sample: SampleSpec) -> nn.Module:
    return _BagOfTokens(_TOKENS, 64, sample.classes)


def _normalised_cnn(sample: SampleSpec) -> nn.Module:
    """Three convolutions, each with batch normalisation."""
    layers: list[nn.Module] = []
    before = sample.shape[0]
    for channels in (32, 64, 64):
        layers += [
            nn.Conv2d(before, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
        before = channels
    side = sample.shape[1] // 8
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(before * side * side, sample.classes))


def _of_zoo(text: str) -> Callable[[SampleSpec], nn.Module]:
    return lambda sample: MODELS.build(text).build(sample)


def _images(channels: int, side: int, classes: int = 10) -> SampleSpec:
    return SampleSpec(shape=(channels, side, side), dtype="float32", classes=classes, task="classify")


def _tokens(length: int) -> SampleSpec:
    return SampleSpec(shape=(length,), dtype="int64", classes=96, task="next-token")


def _vectors(length: int, classes: int) -> SampleSpec:
    return SampleSpec(shape=(length,), dtype="float32", classes=classes, task="classify")


_ALL = (
    Workload(
        name="mlp",
        about="four linear layers of 1024, 17 MB of gradients",
        batch=32,
        sample=_vectors(1024, 1024),
        build=_of_zoo("mlp(1024, 3)"),
    ),
    Workload(
        name="lenet", about="LeNet-5, 28 x 28", batch=32, sample=_images(1, 28), build=_of_zoo("lenet")
    ),
    Workload(
        name="embedding",
        about="mean of 32 embeddings out of 20,000, and a linear layer",
        batch=64,
        sample=SampleSpec(shape=(32,), dtype="int64", classes=20, task="classify"),
        build=_bag,
        tokens=_TOKENS,
    ),
    Workload(
        name="lstm",
        about="two LSTM layers of 128, 64 characters",
        batch=16,
        sample=_tokens(64),
        build=_of_zoo("char-lstm"),
    ),
    Workload(
        name="transformer",
        about="four blocks of 128, 64 characters",
        batch=16,
        sample=_tokens(64),
        build=_of_zoo("char-transformer"),
    ),
    Workload(
        name="cnn",
        about="three convolutions with batch normalisation, 32 x 32",
        batch=16,
        sample=_images(3, 32),
        build=_normalised_cnn,
    ),
    Workload(
        name="resnet18",
        about="20 batch normalisations, 32 x 32",
        batch=8,
        sample=_images(3, 32),
        build=_of_zoo("resnet18"),
    ),
    Workload(
        name="alexnet",
        about="224 x 224, 244 MB of gradients",
        batch=8,
        sample=_images(3, 224, 1000),
        build=_of_zoo("alexnet"),
    ),
    Workload(
        name="vgg16",
        about="64 x 64, 537 MB of gradients",
        batch=4,
        sample=_images(3, 64),
        build=_of_zoo("vgg16"),
    ),
)
WORKLOADS = {one.name: one for one in _ALL}


def workload(name: str, *, where: str = "--model") -> Workload:
    """The workload of this name."""
    if name not in WORKLOADS:
        raise UnknownName("model to measure", name, list(WORKLOADS), where=where)
    return WORKLOADS[name]


def trial_model(job: LocalJob) -> TrialModel:
    """The workload that a trial's job names, with SGD and momentum."""
    one = workload(job.options["workload"])
    model, _, _ = one.make()

    def samples(count: int) -> tuple[Tensor, Tensor]:
        return dataclasses.replace(one, batch=count, build=_nothing).make()[1:]

    return TrialModel(
        model=model,
        loss_fn=lambda logits, y: cross_entropy(logits.flatten(0, -2), y.flatten()),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        samples=samples,
    )


def _nothing(sample: SampleSpec) -> nn.Module:
    return nn.Identity()
