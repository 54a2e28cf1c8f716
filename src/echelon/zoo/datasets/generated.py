"""A classification problem of random clusters (Guyon's design, as in scikit-learn)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.zoo.dataset import Data, SampleSpec, Splits
from echelon.zoo.extra import need_package
from echelon.zoo.options import check_range, check_seed

_DIMENSIONS = 20
_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated(Data):
    """A generated problem: 20 dimensions, 10 classes, 10,000 samples, 80 % of them for training.

    Each class is two Gaussian clusters in 12 dimensions; 4 more are mixtures of those, the last 4 noise.
    Another seed gives another problem.
    """

    name: ClassVar[str] = "generated"

    seed: int = 0
    samples: int = 10_000

    def __post_init__(self) -> None:
        check_seed("data generated", self.seed)
        check_range("data generated", "samples", self.samples, least=100)

    def load(self) -> Splits:
        """Every dimension is scaled to mean 0 and deviation 1."""
        need_package(self.name, "sklearn", "scikit-learn")
        import numpy as np
        import torch
        from sklearn.datasets import make_classification

        from echelon.zoo.arrays import ArrayDataset, collate

        values, labels = make_classification(
            n_samples=self.samples,
            n_features=_DIMENSIONS,
            n_informative=12,
            n_redundant=4,
            n_classes=_CLASSES,
            n_clusters_per_class=2,
            class_sep=1.5,
            flip_y=0.01,
            random_state=np.random.RandomState(self.seed),
        )
        values = (values - values.mean(axis=0)) / values.std(axis=0)
        inputs = torch.from_numpy(values.astype(np.float32))
        targets = torch.from_numpy(labels.astype(np.uint8))
        cut = self.samples * 8 // 10
        return Splits(
            train=ArrayDataset(inputs[:cut].clone(), targets[:cut].clone()),
            test=ArrayDataset(inputs[cut:].clone(), targets[cut:].clone()),
            spec=SampleSpec(shape=(_DIMENSIONS,), dtype="float32", classes=_CLASSES, task="classify"),
            collate=collate,
        )
