"""How is a script read from disk, and written back whole or not at all?"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from echelon.adapt.text import ScriptText
from echelon.errors import ConfigError

_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def read_script(path: Path) -> ScriptText:
    """The text of a script; a ConfigError if it is no script."""
    if path.suffix == ".ipynb":
        raise ConfigError(
            "a notebook is not a script",
            where=str(path),
            fix="export it first: jupyter nbconvert --to script",
        )
    if path.is_dir():
        raise ConfigError("a folder is not a script", where=str(path), fix="give the path of the script")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(
            f"there is no script {path}", where=str(Path.cwd()), fix="give the path of the script"
        ) from None
    return ScriptText.decode(data, where=str(path))


def write_script(path: Path, before: ScriptText, text: str) -> None:
    """Put the new text in the script's place, in its encoding and with its permissions, in one step."""
    path = path.resolve()  # a link stays a link
    mode = path.stat().st_mode
    if not mode & _WRITE or not os.access(path, os.W_OK):
        raise ConfigError(
            "the script is not writable", where=str(path), fix="make it writable, or apply the printed diff"
        )
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(before.encode(text))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, stat.S_IMODE(mode))  # noqa: PTH101
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)  # noqa: PTH108
        raise
