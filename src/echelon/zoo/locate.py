"""Finds data files.

They are in the folder that ECHELON_DATA names, or in `~/.cache/echelon/data` (XDG_CACHE_HOME moves it):

    mnist/*-ubyte.gz, fashion-mnist/*-ubyte.gz, cifar10.zip, text/tinyshakespeare.txt

That folder is only read. Derived files are kept in the cache folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from echelon.errors import DataError


def cache_folder() -> Path:
    """Echelon's folder for files that it can make again."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(given) if Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "echelon"


def data_folder() -> Path:
    """The folder of the data sets; DataError if ECHELON_DATA does not name a folder."""
    given = os.environ.get("ECHELON_DATA", "")
    if not given:
        return cache_folder() / "data"
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise DataError(
            "ECHELON_DATA does not name a folder",
            where=f"ECHELON_DATA={given}",
            fix="correct it, or unset it to use the cache folder",
        )
    return folder.absolute()


def locate(data: str, files: Sequence[Sequence[str]], *, instead: str = "") -> list[Path]:
    """One path per file: the first of its spellings, relative to the data folder, that exists.

    DataError names every missing file, in its first spelling, and the folder to put it in; `instead` names
    an alternative.
    """
    folder = data_folder()
    found: list[Path] = []
    missing: list[str] = []
    for spellings in files:
        present = [folder / name for name in spellings if _exists(folder / name)]
        found += present[:1]
        if not present:
            missing.append(spellings[0])
    if not missing:
        return found
    into = {str((folder / name).parent) for name in missing}
    names = ", ".join(Path(name).name for name in missing)
    other = f" (or {instead})" if instead else ""
    raise DataError(
        f"data set {data} is missing: {len(missing)} of {len(files)} files were not found",
        where=f"data folder {folder}",
        fix=f"put {names}{other} into {' and '.join(sorted(into))}, or set ECHELON_DATA to the folder "
        f"that contains {missing[0]}",
    )


def locate_given(data: str, path: str) -> Path:
    """A path from the user: used directly, or relative to the data folder."""
    direct = Path(path).expanduser()
    if _exists(direct):
        return direct.absolute()
    folder = data_folder()
    if _exists(folder / path):
        return folder / path
    raise DataError(
        f"data set {data}: no file or folder {path!r}",
        where=f"working directory {Path.cwd()}, data folder {folder}",
        fix="give an absolute path, or one relative to either of them",
    )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: OSError) -> DataError:
    """The error for a file that cannot be read."""
    return DataError(
        f"cannot read data: {error.strerror or error}",
        where=str(path),
        fix="check that the file is complete and that you may read it",
    )


def damaged(path: Path | str, reason: str) -> DataError:
    """The error for a file with invalid contents."""
    return DataError(
        f"damaged data file: {reason}", where=str(path), fix="replace the file by an intact copy"
    )
