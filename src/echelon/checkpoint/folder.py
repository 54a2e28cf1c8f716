"""The folders of checkpoints: hidden while they are written, renamed when they are complete.

    <root>/step-000000123            complete, under its own name
    <root>/step-000000123.replaced   one of the same step, while it is replaced
    <root>/.checkpoint-<name>        unfinished, or being removed

Every writer of an unfinished folder holds a lock on it, which the kernel releases when the writer dies. So
a hidden folder whose lock is free is abandoned, and the next writer removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

_STEP = re.compile(r"step-(\d{9,})(\.replaced)?")
_HIDDEN = ".checkpoint-"


def target_of(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return root / f"step-{step:09d}"


def is_named(path: Path) -> bool:
    """Whether it has the name of a checkpoint."""
    return _STEP.fullmatch(path.name) is not None


def steps(root: Path) -> list[tuple[int, bool, Path]]:
    """For each checkpoint: its step, whether a newer one replaced it, and its folder."""
    matches = [match for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [(int(match[1]), match[2] is not None, root / match.string) for match in matches]


def newest_step(root: Path) -> int | None:
    """The step of the newest checkpoint, readable or not; None if there is none."""
    with contextlib.suppress(OSError):
        return max((step for step, _, _ in steps(root)), default=None)
    return None


def make_root(root: Path) -> None:
    """Make the folder of the checkpoints, if it is not there."""
    if not root.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        sync(root.parent)


@contextlib.contextmanager
def unfinished(root: Path, name: str = "") -> Iterator[Path]:
    """A hidden folder, which several writers may share by its name; removed if nobody renamed it.

    The writer that gave it no name is its only one.
    """
    path, handle = _claim(root, name)
    try:
        yield path
    finally:
        os.close(handle)
        if not name:
            shutil.rmtree(path, ignore_errors=True)


def _claim(root: Path, name: str) -> tuple[Path, int]:
    """Make and lock a hidden folder. Another writer may remove it before it is locked: then again."""
    while True:
        path = root / f"{_HIDDEN}{name or uuid.uuid4().hex}"
        path.mkdir(exist_ok=bool(name))
        try:
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        if _lock(handle, fcntl.LOCK_SH) is not False and _is(path, handle):
            return path, handle
        os.close(handle)


def _is(path: Path, handle: int) -> bool:
    """Whether the open folder still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _lock(handle: int, kind: int) -> bool | None:
    """Take the lock; False if another process has it, None if the file system has no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def put(finished: Path, target: Path) -> None:
    """Rename a finished folder. At every moment the old or the new checkpoint can be found."""
    aside = target.with_name(target.name + ".replaced")
    if target.exists():
        discard(aside)
        target.rename(aside)
    try:
        finished.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    sync(target.parent)


def discard(path: Path) -> None:
    """Remove a checkpoint so that it is never partly visible under its name."""
    hidden = path.with_name(f"{_HIDDEN}{uuid.uuid4().hex}")
    try:
        path.rename(hidden)
    except FileNotFoundError:
        return
    shutil.rmtree(hidden, ignore_errors=True)


def sweep(root: Path, *, spare: Callable[[str], bool] = lambda name: False) -> None:
    """Remove hidden folders whose writers are dead, except those whose names are to be spared."""
    for path in root.glob(f"{_HIDDEN}*"):
        if not spare(path.name.removeprefix(_HIDDEN)):
            _remove_if_free(path)


def remove_hidden(root: Path, name: str) -> None:
    """Remove an unfinished folder that its writers have given up."""
    shutil.rmtree(root / f"{_HIDDEN}{name}", ignore_errors=True)


def _remove_if_free(path: Path) -> None:
    """Remove a hidden folder, holding its lock so that nobody else takes it."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        if _lock(handle, fcntl.LOCK_EX):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(handle)


def sync(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
