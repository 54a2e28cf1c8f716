"""Writes a file completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.errors import ConfigError


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file's content by `data`; if that fails, the old content stays."""
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
            fix="free some disk space or check permissions, or choose another file with --out",
        ) from error
