"""Fashion-MNIST: Xiao, Rasul and Vollgraf, 2017."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.zoo.dataset import Data, Splits


@dataclass(frozen=True, slots=True, kw_only=True)
class FashionMnist(Data):
    """Fashion-MNIST: 70,000 pictures of clothes, 28 x 28 grey pixels, four IDX files in fashion-mnist/.

    60,000 for training and 10,000 for testing; the files may be gzipped or plain.
    """

    name: ClassVar[str] = "fashion-mnist"

    def load(self) -> Splits:
        """Normalised 1 x 28 x 28 images."""
        from echelon.zoo.idx import load_idx_splits

        return load_idx_splits(self.name, mean=0.2860, deviation=0.3530)
