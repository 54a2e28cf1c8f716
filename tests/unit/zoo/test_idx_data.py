"""MNIST and Fashion-MNIST: intact IDX files, and damaged ones of every kind."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.errors import DataError
from echelon.zoo.dataset import DATASETS

IMAGES = {"train": "train-images-idx3-ubyte", "test": "t10k-images-idx3-ubyte"}
LABELS = {"train": "train-labels-idx1-ubyte", "test": "t10k-labels-idx1-ubyte"}


def idx_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_set(folder: Path, *, gz: bool = True, train: int = 5, test: int = 3) -> dict[str, np.ndarray]:
    """Write the four files with random pixels; returns the images."""
    folder.mkdir(exist_ok=True)
    random = np.random.RandomState(0)
    images = {}
    for split, count in (("train", train), ("test", test)):
        images[split] = random.randint(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for name, values in ((IMAGES[split], images[split]), (LABELS[split], labels)):
            raw = idx_bytes(values)
            (folder / (name + ".gz" * gz)).write_bytes(gzip.compress(raw) if gz else raw)
    return images


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("gz", [True, False])
def test_files_are_read_gzipped_and_plain(data_home: Path, name: str, gz: bool) -> None:
    images = write_set(data_home / name, gz=gz)
    splits = DATASETS.build(name).load()
    assert splits.spec.shape == (1, 28, 28)
    assert splits.spec.classes == 10
    assert (len(splits.train), len(splits.test)) == (5, 3)
    image, label = splits.train[3]
    assert image.shape == (1, 28, 28)
    assert label == 3
    # Undo the normalisation and compare.
    low, high = image.min(), image.max()
    source = images["train"][3].astype(np.float32)
    scaled = (source - source.min()) / (source.max() - source.min())
    assert torch.allclose((image[0] - low) / (high - low), torch.from_numpy(scaled), atol=1e-5)


def test_mnist_is_normalised_with_its_mean_and_deviation(data_home: Path) -> None:
    images = write_set(data_home / "mnist")
    image, _ = DATASETS.build("mnist").load().test[1]
    expected = (images["test"][1] / 255 - 0.1307) / 0.3081
    assert np.allclose(image[0].numpy(), expected, atol=1e-4)


def test_names_with_a_dot_are_also_found(data_home: Path) -> None:
    write_set(data_home / "mnist", gz=False)
    for file in list((data_home / "mnist").iterdir()):
        file.rename(file.with_name(file.name.replace("-idx", ".idx")))
    assert len(DATASETS.build("mnist").load().train) == 5


def test_missing_files_are_named_with_their_folder(data_home: Path) -> None:
    write_set(data_home / "mnist")
    (data_home / "mnist" / (LABELS["test"] + ".gz")).unlink()
    with pytest.raises(DataError) as caught:
        DATASETS.build("mnist").load()
    assert f"put t10k-labels-idx1-ubyte.gz into {data_home / 'mnist'}" in caught.value.fix


def cut(raw: bytes) -> bytes:
    return raw[:-1]


def lengthen(raw: bytes) -> bytes:
    return raw + b"x"


def empty(raw: bytes) -> bytes:
    return b""


def only_a_magic(raw: bytes) -> bytes:
    return raw[:6]


def other_magic(raw: bytes) -> bytes:
    return b"\x00\x00\x0d" + raw[3:]


def no_images(raw: bytes) -> bytes:
    return idx_bytes(np.zeros((0, 28, 28), np.uint8))


@pytest.mark.parametrize("damage", [cut, lengthen, empty, only_a_magic, other_magic, no_images])
def test_a_damaged_file_is_an_error_naming_it(data_home: Path, damage: Callable[[bytes], bytes]) -> None:
    write_set(data_home / "mnist", gz=False)
    file = data_home / "mnist" / IMAGES["train"]
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError) as caught:
        DATASETS.build("mnist").load()
    assert caught.value.where.startswith(str(data_home / "mnist"))


def broken_stream(raw: bytes) -> bytes:
    return raw[:10] + b"\xff" * 20 + raw[30:]


@pytest.mark.parametrize("damage", [cut, empty, other_magic, broken_stream])
def test_a_damaged_gzip_is_an_error_naming_it(data_home: Path, damage: Callable[[bytes], bytes]) -> None:
    write_set(data_home / "mnist")
    file = data_home / "mnist" / (IMAGES["test"] + ".gz")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError) as caught:
        DATASETS.build("mnist").load()
    assert caught.value.where == str(file)


def test_labels_in_place_of_images_are_an_error(data_home: Path) -> None:
    write_set(data_home / "mnist", gz=False)
    file = data_home / "mnist" / IMAGES["train"]
    file.write_bytes((data_home / "mnist" / LABELS["train"]).read_bytes() + b"\x00" * 100)
    with pytest.raises(DataError, match="00000801, not with 00000803"):
        DATASETS.build("mnist").load()


def test_more_images_than_labels_are_an_error(data_home: Path) -> None:
    write_set(data_home / "mnist", gz=False)
    file = data_home / "mnist" / LABELS["train"]
    file.write_bytes(idx_bytes(np.zeros(4, np.uint8)))
    with pytest.raises(DataError, match="4 labels for the 5 images"):
        DATASETS.build("mnist").load()


def test_a_set_without_images_is_an_error(data_home: Path) -> None:
    write_set(data_home / "mnist", gz=False, test=0)
    with pytest.raises(DataError, match="no images"):
        DATASETS.build("mnist").load()


def test_a_label_beyond_the_classes_is_an_error(data_home: Path) -> None:
    write_set(data_home / "mnist", gz=False)
    file = data_home / "mnist" / LABELS["train"]
    file.write_bytes(idx_bytes(np.full(5, 10, np.uint8)))
    with pytest.raises(DataError, match="label 10"):
        DATASETS.build("mnist").load()


def test_test_images_of_another_size_are_an_error(data_home: Path) -> None:
    write_set(data_home / "mnist", gz=False)
    file = data_home / "mnist" / IMAGES["test"]
    file.write_bytes(idx_bytes(np.zeros((3, 14, 14), np.uint8)))
    with pytest.raises(DataError, match="another size"):
        DATASETS.build("mnist").load()
