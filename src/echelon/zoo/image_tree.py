"""Lists and reads the images in a folder, or in a zip of one.

    train/<class>/.../image.jpg     and test/ (or val/, valid/, validation/) likewise;
    all of it may be inside one more folder

Classes are numbered in the order of their sorted names. A zip is opened once per process: a handle that a
forked loader worker inherits shares its position with the parent's, so the worker opens its own.
"""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from PIL import Image, UnidentifiedImageError

from echelon.errors import DataError
from echelon.zoo.locate import damaged, unreadable

_SUFFIXES = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
_TEST_FOLDERS = ("test", "val", "valid", "validation")


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledNames:
    """The images of one split: `names[i]` is of class `labels[i]`."""

    names: list[str]
    labels: list[int]


class ImageTree:
    """The images under one folder or in one zip. Can be pickled and forked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_folder = path.is_dir()
        self._archive: tuple[int, zipfile.ZipFile] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_archive": None}

    def names(self) -> list[str]:
        """The images' names relative to the root, with slashes, sorted."""
        try:
            if self._is_folder:
                found = [file.relative_to(self.path).as_posix() for file in self.path.rglob("*")]
            else:
                found = self._open().namelist()
        except OSError as error:
            raise unreadable(self.path, error) from error
        return sorted(name for name in found if _is_image(name))

    def splits(self) -> tuple[list[str], LabelledNames, LabelledNames]:
        """Classes, training images, test images; DataError if the layout is different."""
        names = self.names()
        depth = 0 if _below(names, "train", 0) else 1
        train = _below(names, "train", depth)
        test = next((found for folder in _TEST_FOLDERS if (found := _below(names, folder, depth))), [])
        if not train or not test:
            absent = "train/" if not train else "test/ (or val/)"
            raise DataError(
                f"no images found in class folders under {absent}",
                where=str(self.path),
                fix="arrange them as train/<class>/<image> and test/<class>/<image>",
            )
        classes = sorted({kind for kind, _ in train})
        unknown = sorted({kind for kind, _ in test} - set(classes))
        if unknown:
            raise DataError(
                f"class {unknown[0]!r} has test images but no training images",
                where=str(self.path),
                fix=f"add train/{unknown[0]}/, or remove it from the test folder",
            )
        number = {kind: index for index, kind in enumerate(classes)}
        return classes, _labelled(train, number), _labelled(test, number)

    def open_image(self, name: str) -> Image.Image:
        """The image, not decoded yet; pass it to `decode`, or set a draft size first."""
        try:
            return Image.open(io.BytesIO(self._read(name)))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise self._broken(name, error) from error

    def decode(self, name: str, image: Image.Image) -> Image.Image:
        """Decode an image from `open_image` as RGB; DataError if it is incomplete."""
        try:
            return image.convert("RGB")
        except (OSError, SyntaxError, ValueError, EOFError, zlib.error) as error:
            raise self._broken(name, error) from error

    def _broken(self, name: str, error: Exception) -> DataError:
        # Pillow's message names the buffer by its address, which does not help.
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else str(error)
        return damaged(f"{self.path}, {name}", f"unreadable image: {reason}")

    def _read(self, name: str) -> bytes:
        try:
            if self._is_folder:
                return (self.path / name).read_bytes()
            return self._open().read(name)
        except OSError as error:
            raise unreadable(f"{self.path}, {name}", error) from error
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, KeyError) as error:
            raise damaged(f"{self.path}, {name}", str(error)) from error

    def _open(self) -> zipfile.ZipFile:
        if self._archive is None or self._archive[0] != os.getpid():
            try:
                self._archive = (os.getpid(), zipfile.ZipFile(self.path))
            except (zipfile.BadZipFile, EOFError, ValueError) as error:
                raise damaged(self.path, f"not a zip, or truncated: {error}") from error
        return self._archive[1]

    def close(self) -> None:
        """Close the zip; the next read opens it again."""
        if self._archive is not None:
            self._archive[1].close()
            self._archive = None


def _is_image(name: str) -> bool:
    path = PurePosixPath(name)
    hidden = any(part.startswith((".", "__MACOSX")) for part in path.parts)
    return path.suffix.lower() in _SUFFIXES and not hidden


def _below(names: Sequence[str], folder: str, depth: int) -> list[tuple[str, str]]:
    """Class and name of each image below a folder with that name at that depth."""
    found = []
    for name in names:
        parts = PurePosixPath(name).parts
        if len(parts) >= depth + 3 and parts[depth] == folder:
            found.append((parts[depth + 1], name))
    return found


def _labelled(found: Sequence[tuple[str, str]], number: dict[str, int]) -> LabelledNames:
    return LabelledNames(names=[name for _, name in found], labels=[number[kind] for kind, _ in found])
