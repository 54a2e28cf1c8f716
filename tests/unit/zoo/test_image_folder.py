"""The user's own images: layouts, crops, randomness, damage, loader workers."""

from __future__ import annotations

import io
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from echelon.errors import ConfigError, DataError
from echelon.zoo.datasets.image_folder import ImageFolder

MEAN = np.array([0.485, 0.456, 0.406])
DEVIATION = np.array([0.229, 0.224, 0.225])


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3)).astype(np.uint8)
    return Image.fromarray(pixels)


def write(folder: Path, names: dict[str, Image.Image]) -> Path:
    for name, image in names.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        image.save(file)
    return folder


def small_set(folder: Path, test: str = "test") -> Path:
    names = {f"train/{kind}/{n}.png": noise(40, 30, n) for kind in ("smoke", "fire") for n in range(3)}
    names |= {f"{test}/{kind}/{n}.png": noise(30, 40, n) for kind in ("smoke", "fire") for n in range(2)}
    return write(folder, names)


def zipped(folder: Path) -> Path:
    return Path(shutil.make_archive(str(folder), "zip", folder))


def small(path: Path) -> ImageFolder:
    return ImageFolder(path=str(path), size=16, scaled=20)


@pytest.mark.parametrize("test", ["test", "val", "valid", "validation"])
def test_classes_are_numbered_by_name_in_both_splits(tmp_path: Path, test: str) -> None:
    splits = small(small_set(tmp_path / "set", test)).load()
    assert splits.spec.classes == 2
    assert splits.spec.shape == (3, 16, 16)
    assert [splits.train[i][1] for i in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [splits.test[i][1] for i in range(4)] == [0, 0, 1, 1]


def test_a_zip_gives_the_same_as_its_folder(tmp_path: Path) -> None:
    folder = small_set(tmp_path / "set")
    unpacked, packed = small(folder).load(), small(zipped(folder)).load()
    assert len(packed.test) == 4
    for i in range(4):
        assert torch.equal(unpacked.test[i][0], packed.test[i][0])
        assert unpacked.test[i][1] == packed.test[i][1]


def test_one_enclosing_folder_is_allowed(tmp_path: Path) -> None:
    small_set(tmp_path / "outer" / "inner")
    assert len(small(zipped(tmp_path / "outer")).load().train) == 6


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    names = {
        f"{split}/{kind}/deep/1.png": noise(30, 30) for split in ("train", "val") for kind in ("a", "test")
    }
    splits = small(write(tmp_path / "set", names)).load()
    assert (len(splits.train), len(splits.test)) == (2, 2)


def test_files_that_are_not_images_are_ignored(tmp_path: Path) -> None:
    folder = small_set(tmp_path / "set")
    (folder / "train" / "fire" / "notes.txt").write_text("not an image")
    (folder / "train" / "fire" / "._1.png").write_text("what macOS leaves behind")
    assert len(small(folder).load().train) == 6


def test_path_may_be_relative_to_the_data_folder(data_home: Path) -> None:
    small_set(data_home / "set")
    assert len(ImageFolder(path="set").load().train) == 6


def test_default_is_224_from_256_in_the_middle_and_normalised(tmp_path: Path) -> None:
    image = noise(300, 256)
    folder = write(tmp_path / "set", {"train/a/1.png": image, "test/a/1.png": image})
    splits = ImageFolder(path=str(folder)).load()
    assert splits.spec.shape == (3, 224, 224)
    middle = np.asarray(image)[16:240, 38:262]
    expected = ((middle / 255 - MEAN) / DEVIATION).transpose(2, 0, 1)
    assert np.allclose(splits.test[0][0].numpy(), expected, atol=1e-4)


def test_shorter_side_is_scaled_before_the_crop(tmp_path: Path) -> None:
    # Scaled to 512 x 256, the middle square is columns 56 to 144 and rows 6 to 94 of the source.
    pixels = np.full((100, 200, 3), 255, np.uint8)
    pixels[4:96, 54:146] = 0
    folder = write(tmp_path / "set", {f"{s}/a/1.png": Image.fromarray(pixels) for s in ("train", "test")})
    image, _ = ImageFolder(path=str(folder)).load().test[0]
    grey = image * torch.tensor(DEVIATION).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    assert torch.allclose(grey, torch.zeros_like(grey), atol=1e-4)


def test_a_crop_as_large_as_the_scaled_image_stays_within_it(tmp_path: Path) -> None:
    # With these numbers 59 * (62 / 59) is more than 62.
    folder = write(tmp_path / "set", {f"{split}/a/1.png": noise(62, 62) for split in ("train", "test")})
    splits = ImageFolder(path=str(folder), size=59, scaled=59).load()
    assert splits.train[0][0].shape == splits.test[0][0].shape == (3, 59, 59)


def test_training_crops_begin_at_any_place(tmp_path: Path) -> None:
    # Each pixel encodes its row and column; a crop of 16 of 20 has 5 possible starts along either side.
    rows, columns = np.mgrid[0:20, 0:20].astype(np.uint8)
    image = Image.fromarray(np.stack([rows, columns, rows], axis=2))
    names = {f"{split}/a/1.png": image for split in ("train", "test")}
    splits = small(write(tmp_path / "set", names)).load()
    torch.manual_seed(0)
    drawn = [splits.train[0][0] for _ in range(80)]
    assert len({round(crop[0].min().item(), 4) for crop in drawn}) == 5
    assert len({round(crop[1].min().item(), 4) for crop in drawn}) == 5


@pytest.mark.parametrize("size", [(1, 1), (3, 900), (900, 3), (257, 256), (255, 1023)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_images_of_any_size_and_mode_are_accepted(tmp_path: Path, size: tuple[int, int], mode: str) -> None:
    image = noise(*size).convert(mode)
    folder = write(tmp_path / "set", {"train/a/1.jpg": image, "test/a/1.jpg": image})
    splits = ImageFolder(path=str(folder)).load()
    for split in (splits.train, splits.test):
        pixels, _ = split[0]
        assert pixels.shape == (3, 224, 224)
        assert bool(pixels.isfinite().all())


def test_training_crops_and_flips_follow_torchs_seed(tmp_path: Path) -> None:
    splits = small(small_set(tmp_path / "set")).load()

    def draw(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        return [splits.train[0][0] for _ in range(8)]

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_half_of_the_training_images_are_flipped(tmp_path: Path) -> None:
    # The image is darker on the left, so the brighter side of any crop shows a flip.
    ramp = np.repeat(np.linspace(0, 255, 32).astype(np.uint8)[None, :, None], 32, axis=0).repeat(3, axis=2)
    names = {f"{split}/a/1.png": Image.fromarray(ramp) for split in ("train", "test")}
    splits = small(write(tmp_path / "set", names)).load()
    torch.manual_seed(0)
    flipped = sum(
        bool(image[0, 8, 0] > image[0, 8, -1]) for image, _ in (splits.train[0] for _ in range(100))
    )
    assert 30 < flipped < 70
    assert splits.test[0][0][0, 8, 0] < splits.test[0][0][0, 8, -1]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with one core
def test_loader_workers_read_a_zip_that_the_parent_has_open(tmp_path: Path) -> None:
    names = {f"train/a/{n:03}.png": noise(24, 24, n) for n in range(120)}
    names |= {f"test/a/{n:03}.png": noise(24, 24, n) for n in range(120)}
    splits = small(zipped(write(tmp_path / "set", names))).load()
    alone = [splits.test[i][0] for i in range(120)]
    helped = []
    for batch, _ in DataLoader(splits.test, batch_size=4, num_workers=2):
        helped += list(batch)
        assert torch.equal(splits.test[len(helped) - 1][0], alone[len(helped) - 1])
    assert all(torch.equal(a, b) for a, b in zip(alone, helped, strict=True))


def test_loader_workers_draw_the_same_crops_for_the_same_seed(tmp_path: Path) -> None:
    splits = small(zipped(small_set(tmp_path / "set"))).load()

    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(splits.train, batch_size=3, num_workers=1, generator=generator)
        return torch.cat([images for images, _ in loader])

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_a_data_set_with_an_open_zip_can_be_pickled(tmp_path: Path) -> None:
    splits = small(zipped(small_set(tmp_path / "set"))).load()
    before = splits.test[0][0]
    copy = pickle.loads(pickle.dumps(splits.test))
    assert torch.equal(copy[0][0], before)


def half_of_an_image() -> bytes:
    out = io.BytesIO()
    noise(64, 64).save(out, "JPEG")
    return out.getvalue()[: len(out.getvalue()) // 2]


@pytest.mark.parametrize("content", [b"", b"not an image", half_of_an_image()])
@pytest.mark.parametrize("packed", [True, False])
def test_an_unreadable_image_is_an_error_naming_it(tmp_path: Path, content: bytes, packed: bool) -> None:
    folder = small_set(tmp_path / "set")
    (folder / "test" / "fire" / "0.png").write_bytes(content)
    path = zipped(folder) if packed else folder
    splits = small(path).load()
    with pytest.raises(DataError) as caught:
        splits.test[0]
    assert str(path) in caught.value.where
    assert "test/fire/0.png" in caught.value.where


def test_a_damaged_entry_of_a_zip_is_an_error_naming_it(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for name in ("train/a/1.png", "test/a/1.png"):
            archive.writestr(name, b"A" * 1000)
    raw = bytearray((tmp_path / "set.zip").read_bytes())
    raw[500] = 0
    (tmp_path / "set.zip").write_bytes(raw)
    with pytest.raises(DataError, match="CRC") as caught:
        small(tmp_path / "set.zip").load().train[0]
    assert "train/a/1.png" in caught.value.where


@pytest.mark.parametrize("content", [b"", b"not a zip"])
def test_a_file_that_is_not_a_zip_is_an_error_naming_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "set.zip").write_bytes(content)
    with pytest.raises(DataError) as caught:
        small(tmp_path / "set.zip").load()
    assert caught.value.where == str(tmp_path / "set.zip")


@pytest.mark.parametrize(
    ("names", "absent"),
    [
        (["train/a/1.png"], "test/"),
        (["test/a/1.png"], "train/"),
        (["train/1.png", "test/1.png"], "train/"),
        (["a/1.png", "b/1.png"], "train/"),
    ],
)
def test_another_layout_is_an_error_naming_the_expected_one(
    tmp_path: Path, names: list[str], absent: str
) -> None:
    folder = write(tmp_path / "set", {name: noise(20, 20) for name in names})
    with pytest.raises(DataError, match=absent) as caught:
        small(folder).load()
    assert "train/<class>/<image>" in caught.value.fix


def test_a_class_without_training_images_is_an_error(tmp_path: Path) -> None:
    names = {name: noise(20, 20) for name in ("train/a/1.png", "test/a/1.png", "test/b/1.png")}
    with pytest.raises(DataError, match="'b'"):
        small(write(tmp_path / "set", names)).load()


def test_a_path_that_does_not_exist_is_an_error(data_home: Path) -> None:
    with pytest.raises(DataError, match="'nowhere'"):
        ImageFolder(path="nowhere").load()


def test_a_crop_larger_than_the_scaled_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="scaled cannot be 100"):
        ImageFolder(path="x", size=224, scaled=100)
