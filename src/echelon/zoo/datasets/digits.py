"""The handwritten digits that scikit-learn includes (UCI, Alpaydin and Kaynak, 1998)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.zoo.dataset import Data, SampleSpec, Splits
from echelon.zoo.extra import need_package

_TRAIN = 1437
_FULL = 16.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits(Data):
    """1,797 handwritten digits of 8 x 8 grey pixels, included in scikit-learn: nothing to download.

    1,437 for training and 360 for testing, always the same ones.
    """

    name: ClassVar[str] = "digits"

    def load(self) -> Splits:
        """Normalised 1 x 8 x 8 images, shuffled before the split: the file is ordered by writer."""
        need_package(self.name, "sklearn", "scikit-learn")
        import numpy as np
        import torch
        from sklearn.datasets import load_digits

        from echelon.zoo.arrays import ArrayDataset, collate, normaliser

        source = load_digits()
        # numpy guarantees that this generator's numbers never change.
        order = np.random.RandomState(0).permutation(len(source.target))
        inputs = torch.from_numpy(source.images[order].astype(np.uint8)).unsqueeze(1)
        targets = torch.from_numpy(source.target[order].astype(np.uint8))
        scale, shift = normaliser([0.3053], [0.3760], full=_FULL)
        return Splits(
            train=ArrayDataset(inputs[:_TRAIN].clone(), targets[:_TRAIN].clone(), scale=scale, shift=shift),
            test=ArrayDataset(inputs[_TRAIN:].clone(), targets[_TRAIN:].clone(), scale=scale, shift=shift),
            spec=SampleSpec(shape=(1, 8, 8), dtype="float32", classes=10, task="classify"),
            collate=collate,
        )
