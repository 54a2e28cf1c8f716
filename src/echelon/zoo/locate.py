"""Where are data files looked for?

Under the folder that ECHELON_DATA names, else under `~/.cache/echelon/data` (XDG_CACHE_HOME moves it):

    mnist/*-ubyte.gz, fashion-mnist/*-ubyte.gz, cifar10.zip, text/tinyshakespeare.txt

That folder is only read. What is made from the files is kept under the cache folder.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from echelon.errors import DataError


def cache_folder() -> Path:
    """Echelon's own folder for files it can make again."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says that relative paths are to be ignored.
    base = Path(given) if Path(given).is_absolute() else Path("~/.cache").expanduser()
    return base / "echelon"


def data_folder() -> Path:
    """The folder that holds the data sets; DataError if ECHELON_DATA names none."""
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

    DataError names every file that has none, in its first spelling, and the folder to put it in; `instead`
    says what else would do.
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
        f"data set {data} is not there: {len(missing)} of {len(files)} files are missing",
        where=f"data folder {folder}",
        fix=f"put {names}{other} into {' and '.join(sorted(into))}, or set ECHELON_DATA to the folder "
        f"that contains {missing[0]}",
    )


def locate_given(data: str, path: str) -> Path:
    """A path the user gave: as it is, or relative to the data folder."""
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
    """The error for a file that the system does not let us read."""
    return DataError(
        f"cannot read data: {error.strerror or error}",
        where=str(path),
        fix="check that the file is complete and that you may read it",
    )


def damaged(path: Path | str, reason: str) -> DataError:
    """The error for a file that is there but not what it should be."""
    return DataError(
        f"damaged data file: {reason}", where=str(path), fix="replace the file by an intact copy"
    )
