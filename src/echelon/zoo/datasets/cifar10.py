"""CIFAR-10: Krizhevsky, "Learning multiple layers of features from tiny images", 2009.

Both sources are converted to records of the binary version: one byte for the class, then 3 x 32 x 32.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from echelon.errors import DataError
from echelon.zoo.dataset import Data, SampleSpec, Splits
from echelon.zoo.extra import need_package
from echelon.zoo.locate import damaged, data_folder, locate, unreadable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from echelon.zoo.arrays import ArrayDataset
    from echelon.zoo.image_tree import ImageTree, LabelledNames

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_CLASSES = 10
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_BINARY_FOLDERS = ("cifar-10-batches-bin", "cifar10/cifar-10-batches-bin", "cifar10")
_TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar10(Data):
    """CIFAR-10: 60,000 colour images of 32 x 32, from cifar10.zip or cifar-10-batches-bin/.

    50,000 for training and 10,000 for testing. cifar10.zip holds images as train/<class>/ and
    test/<class>/; it is decoded once and cached. cifar-10-batches-bin/ is the binary version; the Python
    version is not supported, because reading it runs pickle.
    """

    name: ClassVar[str] = "cifar10"

    def load(self) -> Splits:
        """Normalised 3 x 32 x 32 images."""
        from echelon.zoo.arrays import collate

        folder = next((name for name in _BINARY_FOLDERS if _has_batches(data_folder() / name)), None)
        train, test = self._from_zip() if folder is None else self._from_batches(folder)
        return Splits(
            train=_dataset(train),
            test=_dataset(test),
            spec=SampleSpec(shape=_SHAPE, dtype="float32", classes=_CLASSES, task="classify"),
            collate=collate,
        )

    def _from_batches(self, folder: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        import numpy as np

        names = [*_TRAIN_FILES, "test_batch.bin"]
        *train, test = locate(self.name, [[f"{folder}/{name}"] for name in names])
        return np.concatenate([_read_batch(file) for file in train]), _read_batch(test)

    def _from_zip(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        from echelon.zoo.derived import derived_arrays

        (source,) = locate(
            self.name,
            [["cifar10.zip", "cifar10/cifar10.zip"]],
            instead="cifar-10-batches-bin/ with the six .bin files of the binary version",
        )
        arrays = derived_arrays(self.name, source, ("train", "test"), lambda: _decode_zip(source))
        return arrays["train"], arrays["test"]


def _has_batches(folder: Path) -> bool:
    return any(folder.glob("*_batch*.bin"))


def _read_batch(file: Path) -> NDArray[np.uint8]:
    import numpy as np

    try:
        values = np.fromfile(file, dtype=np.uint8)
    except OSError as error:
        raise unreadable(file, error) from error
    if values.size == 0 or values.size % _RECORD:
        raise damaged(file, f"{values.size} bytes are not a whole number of {_RECORD}-byte records")
    records = values.reshape(-1, _RECORD)
    if records[:, 0].max() >= _CLASSES:
        raise damaged(file, f"class {records[:, 0].max()} is not one of 0 to {_CLASSES - 1}")
    return records


def _decode_zip(source: Path) -> dict[str, NDArray[np.uint8]]:
    need_package("cifar10", "PIL", "pillow")
    from echelon.zoo.image_tree import ImageTree

    tree = ImageTree(source)
    classes, train, test = tree.splits()
    if len(classes) != _CLASSES:
        raise DataError(
            f"{len(classes)} class folders, but CIFAR-10 has {_CLASSES}",
            where=str(source),
            fix="put another copy of CIFAR-10 there; for other images use image-folder(path=...)",
        )
    total = len(train.names) + len(test.names)
    _log.info("decoding %d images of %s, once; the result is cached", total, source)
    records = {"train": _decode(tree, train), "test": _decode(tree, test)}
    tree.close()
    return records


def _decode(tree: ImageTree, images: LabelledNames) -> NDArray[np.uint8]:
    import numpy as np

    records = np.empty((len(images.names), _RECORD), dtype=np.uint8)
    records[:, 0] = images.labels
    for index, name in enumerate(images.names):
        pixels = np.asarray(tree.decode(name, tree.open_image(name)))
        if pixels.shape != (32, 32, 3):
            raise damaged(
                f"{tree.path}, {name}", f"{pixels.shape[1]} x {pixels.shape[0]} pixels, not 32 x 32"
            )
        records[index, 1:] = pixels.transpose(2, 0, 1).reshape(-1)
        if (index + 1) % 10_000 == 0:
            _log.info("decoded %d of %d images", index + 1, len(images.names))
    return records


def _dataset(records: NDArray[np.uint8]) -> ArrayDataset:
    import torch

    from echelon.zoo.arrays import ArrayDataset, normaliser

    values = torch.from_numpy(records)
    scale, shift = normaliser(_MEAN, _DEVIATION)
    return ArrayDataset(values[:, 1:].view(-1, *_SHAPE), values[:, 0], scale=scale, shift=shift)
