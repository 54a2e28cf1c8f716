"""Checks which data sets are available."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from echelon.cluster.checkup.finding import Finding, Level
from echelon.errors import DataError
from echelon.zoo.dataset import DATASETS
from echelon.zoo.locate import data_folder

# Files to look for in the data folder, any of the patterns. Other data sets are built in, or need a path.
_FILES = {
    "mnist": ("mnist/train-images*-ubyte*",),
    "fashion-mnist": ("fashion-mnist/train-images*-ubyte*",),
    "cifar10": (
        "cifar10.zip",
        "cifar10/cifar10.zip",
        "cifar*/data_batch_1.bin",
        "cifar10/*/data_batch_1.bin",
    ),
    "text": ("text/tinyshakespeare.txt",),
}
_FIX = "put their files there, or set ECHELON_DATA to the folder that has them"
_GIVEN_A_PATH = ("image-folder",)


def data_sets() -> Iterator[Finding]:
    """The data folder, the data sets in it, and those that need no files."""
    built_in = [name for name in DATASETS.names() if name not in (*_FILES, *_GIVEN_A_PATH)]
    yield _data("ok", "built in", ", ".join(built_in))
    try:
        folder = data_folder()
    except DataError as error:
        yield _data("problem", "ECHELON_DATA", f"{error.message} ({error.where})", error.fix)
        return
    how = "" if os.environ.get("ECHELON_DATA") else " (ECHELON_DATA is not set)"
    there = [name for name, patterns in _FILES.items() if _any(folder, patterns)]
    absent = [name for name in _FILES if name not in there]
    if there:
        yield _data("ok", "in folder", f"{', '.join(there)} in {folder}{how}")
    if absent:
        yield _data("note", "absent", f"{', '.join(absent)} not in {folder}{how}", _FIX)


def _any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _data(level: Level, subject: str, text: str, fix: str = "") -> Finding:
    return Finding(level=level, topic="data", subject=subject, text=text, fix=fix)
