"""Your own images: a folder, or a zip of one, with a subfolder per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.zoo.dataset import Data, SampleSpec, Splits
from echelon.zoo.extra import need_package
from echelon.zoo.locate import locate_given
from echelon.zoo.options import check_range


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolder(Data):
    """Images in a folder, or a zip of one, as train/<class>/ and test/<class>/ (or val/<class>/).

    The shorter side is scaled to `scaled` pixels and `size` x `size` are cut out: at a random place and
    randomly flipped for training, from the middle for testing. Normalised with mean .485/.456/.406 and
    deviation .229/.224/.225. Images are read on demand: use loader workers to read ahead.
    """

    name: ClassVar[str] = "image-folder"

    path: str
    size: int = 224
    scaled: int = 256

    def __post_init__(self) -> None:
        check_range("data image-folder", "size", self.size, least=1)
        check_range("data image-folder", "scaled", self.scaled, least=self.size)

    def load(self) -> Splits:
        """List the images; none is decoded yet."""
        need_package(self.name, "PIL", "pillow")
        from echelon.zoo.crops import CropDataset
        from echelon.zoo.image_tree import ImageTree

        tree = ImageTree(locate_given(self.name, self.path))
        classes, train, test = tree.splits()
        return Splits(
            train=CropDataset(tree, train, size=self.size, scaled=self.scaled, training=True),
            test=CropDataset(tree, test, size=self.size, scaled=self.scaled, training=False),
            spec=SampleSpec(
                shape=(3, self.size, self.size), dtype="float32", classes=len(classes), task="classify"
            ),
        )
