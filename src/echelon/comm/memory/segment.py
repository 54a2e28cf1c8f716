"""Anonymous memory that processes of one machine share. Nothing remains, however they end.

It is an unnamed file in /dev/shm. Other processes open it through /proc/PID/fd of its maker and compare
device and inode, because in another container that process id may belong to another process. The memory
lives as long as a process maps it.
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
    """How other processes find a segment: its file descriptor, inode and device."""

    fd: int
    inode: int = 0
    device: int = 0


Gather = Callable[[Handle], list[Handle]]
_NONE = Handle(-1)
_FINE = Handle(0)


def share(
    size_bytes: int, rank: int, pids: Sequence[int], makers: Sequence[int], gather: Gather
) -> list[Tensor]:
    """Map one segment of each maker, as bytes, on every worker. Either all workers succeed, or none.

    `gather` exchanges handles and returns those of this machine first, by the ranks used here. If it
    includes other machines, all of them succeed, or none. All workers call this together.
    """
    own: int | None = None
    failure: LaunchError | None = None
    try:
        if rank in makers:
            try:
                own = make(size_bytes)
            except OSError as error:
                failure = no_room(size_bytes, error)
        handles = gather(_NONE if own is None else handle_of(own))
        found: list[Tensor] = []
        if all(handles[maker] != _NONE for maker in makers):
            try:
                found = [map_segment(pids[maker], handles[maker], size_bytes) for maker in makers]
            except (OSError, RuntimeError) as error:
                failure = no_room(size_bytes, error)
        if _NONE not in gather(_FINE if len(found) == len(makers) else _NONE):
            return found
    finally:
        if own is not None:
            os.close(own)
    raise failure or LaunchError("another worker could not get shared memory", where=str(FOLDER))


def make(size_bytes: int) -> int:
    """Reserve the memory now, so that a full file system is noticed here and not at a write."""
    fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def handle_of(fd: int) -> Handle:
    """How other processes find the segment with this file descriptor."""
    found = os.fstat(fd)
    return Handle(fd, found.st_ino, found.st_dev)


def map_segment(pid: int, handle: Handle, size_bytes: int) -> Tensor:
    """Map a segment of that process, as bytes."""
    fd = os.open(f"/proc/{pid}/fd/{handle.fd}", os.O_RDWR)
    try:
        if handle_of(fd)[1:] != handle[1:]:
            raise RuntimeError(f"process {pid} is a different process here")
        # Python's mmap would keep a file open for each mapping.
        return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size_bytes, dtype=torch.uint8)
    finally:
        os.close(fd)


def no_room(size_bytes: int, error: OSError | RuntimeError) -> LaunchError:
    """The error for a worker that cannot make or map a segment."""
    why = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
    failure = LaunchError(
        f"no room for {size_bytes} bytes of shared memory: {why}",
        where=str(FOLDER),
        fix="make room there, or use --transport tcp",
    )
    failure.__cause__ = error
    return failure
