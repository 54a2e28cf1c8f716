"""Caches arrays that take long to make from a file, for later runs and for other workers.

They are valid for a source of the same size and modification time. One process makes them while the others
wait for its lock, which the system releases if it dies. They are memory-mapped, so that the workers of a
machine share them. If the cache cannot be written, they are made each time.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from echelon.zoo.locate import cache_folder

_log = logging.getLogger(__name__)

Arrays: TypeAlias = Mapping[str, NDArray[np.uint8]]


def derived_arrays(name: str, source: Path, parts: Sequence[str], make: Callable[[], Arrays]) -> Arrays:
    """The arrays `parts` that `make` makes from `source`, from the cache if possible."""
    state = source.stat()
    folder = cache_folder() / "derived"
    files = {part: folder / f"{name}-{part}-{state.st_size}-{state.st_mtime_ns}.npy" for part in parts}
    kept = _read(files)
    if kept is not None:
        return kept
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / f"{name}.lock").open("ab")
    except OSError as error:
        _log.warning("%s will be made again each time: %s: %s", name, folder, error.strerror)
        return make()
    with lock:
        _wait_for(lock, name)
        kept = _read(files)
        if kept is not None:
            return kept
        return _keep(name, files, make())


def _wait_for(lock: IO[bytes], name: str) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _log.info("another process is making %s; waiting for it", name)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _read(files: Mapping[str, Path]) -> Arrays | None:
    try:
        # Mode "c" shares the file's pages and never writes to it, but counts as writable for torch.
        return {part: np.load(file, mmap_mode="c", allow_pickle=False) for part, file in files.items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        _log.warning("a cached file is damaged and will be made again: %s", error)
        return None


def _keep(name: str, files: Mapping[str, Path], made: Arrays) -> Arrays:
    folder = next(iter(files.values())).parent
    for old in folder.glob(f"{name}-*"):
        old.unlink(missing_ok=True)
    for part, file in files.items():
        partial = file.with_suffix(f".partial-{os.getpid()}")
        try:
            with partial.open("wb") as out:
                np.save(out, made[part], allow_pickle=False)
            partial.replace(file)
        except OSError as error:
            _log.warning("%s cannot be cached: %s: %s", name, file, error.strerror)
            partial.unlink(missing_ok=True)
            return made
    return _read(files) or made
