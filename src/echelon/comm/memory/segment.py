"""Memory that processes of one machine share. It never has a name, so nothing remains however they end.

It is an unnamed file in /dev/shm. The others open it through the maker's list of open files, /proc/PID/fd,
and compare device and inode, for in another container that process number may be somebody else's. The
memory lives as long as anybody maps it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.errors import LaunchError

FOLDER = Path("/dev/shm")


class Handle(NamedTuple):
    """How others find a segment: the number of the open file, and what it must turn out to be."""

    fd: int
    inode: int = 0
    device: int = 0


Gather = Callable[[Handle], list[Handle]]
_NONE = Handle(-1)
_FINE = Handle(0)


def share(
    size_bytes: int, rank: int, pids: Sequence[int], makers: Sequence[int], gather: Gather
) -> list[Tensor]:
    """One segment of each maker, as bytes, in everybody's memory. Either all workers get them, or none.

    `gather` gives everybody what each one said, those of this machine first, by the ranks used here. If it
    asks other machines too, all of them get theirs, or none. All call this together.
    """
    own: int | None = None
    failure: LaunchError | None = None
    try:
        if rank in makers:
            try:
                own = _make(size_bytes)
            except OSError as error:
                failure = _no_room(size_bytes, error)
        said = gather(_NONE if own is None else _handle(own))
        found: list[Tensor] = []
        if all(said[maker] != _NONE for maker in makers):
            try:
                found = [_map(pids[maker], said[maker], size_bytes) for maker in makers]
            except (OSError, RuntimeError) as error:
                failure = _no_room(size_bytes, error)
        if _NONE not in gather(_FINE if len(found) == len(makers) else _NONE):
            return found
    finally:
        if own is not None:
            os.close(own)
    raise failure or LaunchError("another worker could not get shared memory", where=str(FOLDER))


def _make(size_bytes: int) -> int:
    """Reserved at once, so that a full file system is noticed here, and not when it is written to."""
    fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _handle(fd: int) -> Handle:
    found = os.fstat(fd)
    return Handle(fd, found.st_ino, found.st_dev)


def _map(pid: int, handle: Handle, size_bytes: int) -> Tensor:
    fd = os.open(f"/proc/{pid}/fd/{handle.fd}", os.O_RDWR)
    try:
        if _handle(fd)[1:] != handle[1:]:
            raise RuntimeError(f"process {pid} is another one here")
        # Not Python's mmap, which keeps a file open for each mapping.
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size_bytes, dtype=torch.uint8)
    finally:
        os.close(fd)


def _no_room(size_bytes: int, error: OSError | RuntimeError) -> LaunchError:
    why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    failure = LaunchError(
        f"no room for {size_bytes} bytes of shared memory: {why}",
        where=str(FOLDER),
        fix="make room there, or use --transport tcp",
    )
    failure.__cause__ = error
    return failure
