"""CIFAR-10 from the binary version and from a zip of images, and the cache of decoded images."""

from __future__ import annotations

import io
import logging
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.errors import DataError
from echelon.zoo.dataset import DATASETS, Splits

BATCHES = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def load() -> Splits:
    return DATASETS.build("cifar10").load()


def records(count: int, seed: int) -> np.ndarray:
    values = np.random.RandomState(seed).randint(0, 256, (count, 3073)).astype(np.uint8)
    values[:, 0] = np.arange(count) % 10
    return values


def write_batches(folder: Path, count: int = 4) -> None:
    folder.mkdir(parents=True)
    for seed, name in enumerate(BATCHES):
        (folder / name).write_bytes(records(count, seed).tobytes())


def image_bytes(seed: int, *, side: int = 32, form: str = "PNG") -> bytes:
    pixels = np.random.RandomState(seed).randint(0, 256, (side, side, 3)).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, form)
    return out.getvalue()


def write_zip(file: Path, *, first_seed: int = 0, classes: list[str] = CLASSES) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for seed, kind in enumerate(classes, start=first_seed):
            archive.writestr(f"train/{kind}/1.png", image_bytes(seed))
            archive.writestr(f"train/{kind}/2.jpg", image_bytes(seed, form="JPEG"))
            archive.writestr(f"test/{kind}/1.png", image_bytes(seed + 100))


def normalised(pixels: np.ndarray) -> np.ndarray:
    """The expected sample for pixels of height x width x 3."""
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return ((pixels / 255 - mean) / deviation).transpose(2, 0, 1)


@pytest.mark.parametrize("folder", ["cifar-10-batches-bin", "cifar10"])
def test_the_binary_version_is_read(data_home: Path, folder: str) -> None:
    write_batches(data_home / folder)
    splits = load()
    assert (len(splits.train), len(splits.test)) == (20, 4)
    assert splits.spec.shape == (3, 32, 32)
    image, label = splits.train[6]  # the third record of the second batch
    record = records(4, seed=1)[2]
    assert label == record[0]
    assert np.allclose(
        image.numpy(), normalised(record[1:].reshape(3, 32, 32).transpose(1, 2, 0)), atol=1e-4
    )


def test_a_missing_batch_is_named(data_home: Path) -> None:
    write_batches(data_home / "cifar-10-batches-bin")
    (data_home / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(DataError) as caught:
        load()
    assert "data_batch_3.bin" in caught.value.fix


@pytest.mark.parametrize("damage", [b"", records(2, 0).tobytes()[:-1], b"\x0a" + bytes(3072)])
def test_a_damaged_batch_is_an_error_naming_it(data_home: Path, damage: bytes) -> None:
    write_batches(data_home / "cifar-10-batches-bin")
    file = data_home / "cifar-10-batches-bin" / "data_batch_2.bin"
    file.write_bytes(damage)
    with pytest.raises(DataError) as caught:
        load()
    assert caught.value.where == str(file)


def test_missing_files_are_an_error_naming_both_forms(data_home: Path) -> None:
    with pytest.raises(DataError) as caught:
        load()
    assert "cifar10.zip" in caught.value.fix
    assert "cifar-10-batches-bin/" in caught.value.fix


def test_a_zip_of_images_is_decoded(data_home: Path) -> None:
    write_zip(data_home / "cifar10.zip")
    splits = load()
    assert (len(splits.train), len(splits.test)) == (20, 10)
    image, label = splits.test[7]
    assert label == CLASSES.index("horse")
    pixels = np.asarray(Image.open(io.BytesIO(image_bytes(107))))
    assert np.allclose(image.numpy(), normalised(pixels), atol=1e-4)


def test_decoding_is_reported_and_done_once(data_home: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_zip(data_home / "cifar10.zip")
    first = load()
    assert "decoding 30 images" in caplog.text
    caplog.clear()
    second = load()
    assert caplog.text == ""
    assert all(bool((first.train[i][0] == second.train[i][0]).all()) for i in range(20))


def test_cached_images_are_not_in_the_data_folder(data_home: Path) -> None:
    write_zip(data_home / "cifar10.zip")
    load()
    assert [file.name for file in data_home.iterdir()] == ["cifar10.zip"]


@pytest.mark.parametrize("what", ["size", "time"])
def test_another_zip_is_decoded_again(data_home: Path, what: str) -> None:
    file = data_home / "cifar10.zip"
    write_zip(file)
    before = file.stat()
    load()
    if what == "size":
        write_zip(file, first_seed=50)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file.stat().st_size != before.st_size
        pixels = np.asarray(Image.open(io.BytesIO(image_bytes(150))))
        assert np.allclose(load().test[0][0].numpy(), normalised(pixels), atol=1e-4)
    else:
        file.write_bytes(b"x" * before.st_size)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        with pytest.raises(DataError):
            load()


def test_cached_images_of_an_older_zip_are_removed(data_home: Path, tmp_path: Path) -> None:
    file = data_home / "cifar10.zip"
    write_zip(file)
    load()
    write_zip(file, first_seed=50)
    load()
    kept = list((tmp_path / "cache" / "echelon" / "derived").glob("*.npy"))
    assert len(kept) == 2


@pytest.mark.parametrize("keep", [0, 200])
def test_a_damaged_cached_file_is_made_again(data_home: Path, tmp_path: Path, keep: int) -> None:
    write_zip(data_home / "cifar10.zip")
    load()
    (train,) = (tmp_path / "cache" / "echelon" / "derived").glob("cifar10-train-*.npy")
    train.write_bytes(train.read_bytes()[:keep])
    assert len(load().train) == 20


def test_without_a_writable_cache_it_is_decoded_each_time(
    data_home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where a folder is needed")
    write_zip(data_home / "cifar10.zip")
    assert len(load().train) == 20
    assert "made again each time" in caplog.text


def test_a_truncated_zip_is_an_error_naming_it(data_home: Path) -> None:
    file = data_home / "cifar10.zip"
    write_zip(file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError) as caught:
        load()
    assert caught.value.where == str(file)


def test_a_zip_with_other_classes_is_an_error(data_home: Path) -> None:
    write_zip(data_home / "cifar10.zip", classes=CLASSES[:3])
    with pytest.raises(DataError, match="3 class folders"):
        load()


def test_an_image_of_another_size_is_named(data_home: Path) -> None:
    write_zip(data_home / "cifar10.zip")
    with zipfile.ZipFile(data_home / "cifar10.zip", "a") as archive:
        archive.writestr("train/cat/big.png", image_bytes(0, side=33))
    with pytest.raises(DataError, match="33 x 33") as caught:
        load()
    assert "train/cat/big.png" in caught.value.where


def test_a_failed_decoding_leaves_no_files(data_home: Path, tmp_path: Path) -> None:
    write_zip(data_home / "cifar10.zip")
    with zipfile.ZipFile(data_home / "cifar10.zip", "a") as archive:
        archive.writestr("train/cat/bad.png", b"not an image")
    with pytest.raises(DataError):
        load()
    assert not list((tmp_path / "cache" / "echelon" / "derived").glob("*.npy"))
