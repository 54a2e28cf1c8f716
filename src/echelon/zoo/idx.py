"""Reads IDX files, plain or gzipped, and makes a data set from four of them.

The format: two zero bytes, one for the type (8 is unsigned byte), one for the number of dimensions, each
dimension as a big-endian 32-bit number, then the values. Only unsigned bytes are supported.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.zoo.dataset import SampleSpec, Splits
from echelon.zoo.locate import damaged, locate, unreadable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from echelon.zoo.arrays import ArrayDataset

_CLASSES = 10


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """The array in the file; DataError if it is not an IDX file of that many dimensions, or truncated."""
    import numpy as np

    raw = _bytes_of(path)
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise damaged(path, f"{len(raw)} bytes are too few for an IDX file")
    if raw[:4] != bytes((0, 0, 8, dimensions)):
        raise damaged(path, f"it begins with {raw[:4].hex()}, not with 000008{dimensions:02x}")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    if len(raw) - header != math.prod(shape):
        sizes = " x ".join(str(n) for n in shape)
        raise damaged(path, f"the header promises {sizes} values, but there are {len(raw) - header}")
    # Copied, because torch warns about read-only buffers.
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape).copy()


def _bytes_of(path: Path) -> bytes:
    try:
        if path.suffix != ".gz":
            return path.read_bytes()
        with gzip.open(path, "rb") as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, str(error)) from error
    except OSError as error:
        raise unreadable(path, error) from error


def load_idx_splits(data: str, *, mean: float, deviation: float) -> Splits:
    """The data set from the four IDX files in the folder of its name; pixels are normalised."""
    from echelon.zoo.arrays import collate

    stems = [f"{split}-{kind}" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    files = locate(data, [_spellings(data, stem) for stem in stems])
    train = _split(files[0], files[1], mean, deviation)
    test = _split(files[2], files[3], mean, deviation)
    if train.inputs.shape[1:] != test.inputs.shape[1:]:
        raise damaged(files[2], "its images have another size than the training images")
    shape = tuple(train.inputs.shape[1:])
    spec = SampleSpec(shape=shape, dtype="float32", classes=_CLASSES, task="classify")
    return Splits(train=train, test=test, spec=spec, collate=collate)


def _spellings(data: str, stem: str) -> list[str]:
    dotted = stem.replace("-idx", ".idx")
    names = [f"{stem}-ubyte.gz", f"{stem}-ubyte", f"{dotted}-ubyte.gz", f"{dotted}-ubyte"]
    return [f"{data}/{name}" for name in names]


def _split(images: Path, labels: Path, mean: float, deviation: float) -> ArrayDataset:
    import torch

    from echelon.zoo.arrays import ArrayDataset, normaliser

    pixels = read_idx(images, 3)
    targets = read_idx(labels, 1)
    if len(pixels) != len(targets):
        raise damaged(labels, f"{len(targets)} labels for the {len(pixels)} images of {images.name}")
    if not len(targets):
        raise damaged(images, "it holds no images")
    if targets.max() >= _CLASSES:
        raise damaged(labels, f"label {targets.max()} is not one of 0 to {_CLASSES - 1}")
    scale, shift = normaliser([mean], [deviation])
    inputs = torch.from_numpy(pixels).unsqueeze(1)
    return ArrayDataset(inputs, torch.from_numpy(targets), scale=scale, shift=shift)
