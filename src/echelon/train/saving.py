"""What happens when all workers `torch.save` to one path? One whole file, that of the lowest rank.

Scripts that were written for one process save on every worker. While a session with several workers is
open, `torch.save` to a path writes a file beside it and renames that, so nobody reads half a file. If the
first worker of the machine saves to the same path, its file stays: another worker's n-th save there is left
out when the first worker's n-th is written already, and is replaced by it otherwise. Machines may have
disks of their own, so each has a file.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

_LOCK_S = 10.0
_POLL_S = 0.002
_log = logging.getLogger(__name__)


class WholeSaves:
    """Replaces `torch.save` while a session is open.

    `first` is the lowest rank on this machine; `count(key, n)` adds to a counter of all workers.
    """

    def __init__(self, rank: int, first: int, count: Callable[[str, int], int]) -> None:
        self._rank = rank
        self._first = first
        self._count = count
        self._saves: Counter[str] = Counter()
        self._told = False
        self._own = torch.save

    def install(self) -> None:
        """From now on files are written whole."""
        own = self._own

        @functools.wraps(own)
        def save(obj: object, f: Any, *args: Any, **options: Any) -> None:
            if not isinstance(f, (str, os.PathLike)):
                own(obj, f, *args, **options)
                return
            self._save(Path(f), lambda beside: own(obj, beside, *args, **options))

        save.echelon = self  # type: ignore[attr-defined]
        torch.save = save

    def remove(self) -> None:
        """Put torch's own function back, if nobody else has replaced it since."""
        if getattr(torch.save, "echelon", None) is self:
            torch.save = self._own

    def _save(self, path: Path, write: Callable[[Path], None]) -> None:
        # A device, or something else that cannot be replaced: as torch does it.
        if path.exists() and not path.is_file():
            write(path)
            return
        key = f"saves/{self._first}/{os.fspath(path.absolute())}"
        self._saves[key] += 1
        beside = path.with_name(f".{path.name}.rank-{self._rank}-{os.getpid()}")
        if self._is_there(key, path):
            return
        try:
            write(beside)
            with _locked(path.parent):
                if not self._is_there(key, path):
                    beside.replace(path)
                if self._rank == self._first:
                    self._count(key, 1)
        finally:
            beside.unlink(missing_ok=True)

    def _is_there(self, key: str, path: Path) -> bool:
        """Whether the first worker has written what this one is about to write."""
        if self._rank == self._first or self._count(key, 0) < self._saves[key]:
            return False
        self._tell(path)
        return True

    def _tell(self, path: Path) -> None:
        if not self._told:
            self._told = True
            _log.info(
                "rank %d and rank %d save to %s: the file of rank %d stays; save on the leader only "
                "(if session.is_leader), or with session.save",
                self._first,
                self._rank,
                path,
                self._first,
            )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process; after a while, go on without it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        until = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:  # another worker has it, or this file system has no locks
                if time.monotonic() > until:
                    break
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(held)
