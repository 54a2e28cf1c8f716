"""Images read on demand: scaled, cropped, normalised.

The shorter side is scaled to `scaled` pixels and a square of `size` is cut out: at a random place and
randomly flipped for training, from the middle for testing. Both happen in one resampling, so that only the
pixels of the square are computed. Randomness comes from torch's generator, which loaders seed in every
worker.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from echelon.zoo.arrays import normaliser
from echelon.zoo.image_tree import ImageTree, LabelledNames

MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


class CropDataset(Dataset[tuple[Tensor, int]]):
    """The images of one split as normalised 3 x size x size tensors."""

    def __init__(
        self, tree: ImageTree, images: LabelledNames, *, size: int, scaled: int, training: bool
    ) -> None:
        self.tree = tree
        self.images = images
        self.size = size
        self.scaled = scaled
        self.training = training
        self.scale, self.shift = normaliser(MEAN, DEVIATION)

    def __len__(self) -> int:
        return len(self.images.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        name = self.images.names[index]
        image = self.tree.open_image(name)
        # A JPEG can be decoded at a fraction of its size, as long as that is not smaller than needed.
        image.draft("RGB", (self.scaled, self.scaled))
        square = self._square(self.tree.decode(name, image))
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)
        if self.training and torch.rand(()) < 0.5:
            pixels = pixels.flip(-1)
        return (pixels * self.scale + self.shift).contiguous(), self.images.labels[index]

    def _square(self, image: Image.Image) -> Image.Image:
        shorter = min(image.size)
        per_pixel = shorter / self.scaled
        side = self.size * per_pixel
        left, top = (self._offset(length / per_pixel) * per_pixel for length in image.size)
        box = (left, top, left + side, top + side)
        return image.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)

    def _offset(self, length: float) -> float:
        """Where the square begins along a scaled side of that length."""
        free = max(0.0, length - self.size)
        if not self.training:
            return free / 2
        return float(torch.randint(int(free) + 1, ()))
