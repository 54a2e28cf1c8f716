"""Writes a file completely or not at all; says before long work that it could not be written."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from echelon.errors import ConfigError


def write_whole(path: Path, data: bytes, *, option: str = "--out") -> None:
    """Replace the file's content by `data`; if that fails, the old content stays.

    `option` chooses another file; empty if none does.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_bytes(data)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path.name}: {error.strerror}",
            where=str(path.parent),
            fix="free some disk space or check permissions"
            + (f", or choose another file with {option}" if option else ""),
        ) from error


def check_writable(folder: Path, *, where: str) -> None:
    """Refuse a folder in which no file can be made, before work begins whose result belongs there."""
    made: list[Path] = []
    try:
        for part in (*reversed(folder.parents), folder):
            if not part.exists():
                part.mkdir()
                made.append(part)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}",
            where=where,
            fix="check the path and its permissions, or give another one",
        ) from error
    finally:
        for part in reversed(made):  # it is made again when there is something to write
            with suppress(OSError):
                part.rmdir()
