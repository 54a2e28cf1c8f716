"""What becomes of memory that a step frees: is it kept for the next step, or does the system get it back?

glibc gives large freed blocks back to the system, and the end of its heap once enough of that is free. The
next step asks for the same blocks again, and the system clears every page of them anew. Workers keep them
instead, which changes no result and saves up to a third of a step.

A worker with shards does the opposite. It gathers and frees parameters all the time, so blocks that are
kept would add up to several times of what it uses.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_ALWAYS_BYTES = 2**31 - 1  # the largest threshold that mallopt takes
_OLD_GLIBC_BYTES = 32 * 2**20  # the largest threshold for mappings that glibc before 2.35 takes
_GIVEN_BACK_BYTES = 256 * 1024
_USUAL_TRIM_BYTES = 128 * 1024
USERS_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """From now on freed blocks stay with this process; False where that cannot be set.

    Nothing changes if the user has set glibc's own variables.
    """
    libc = _glibc()
    if libc is None:
        return False
    kept = libc.mallopt(_M_TRIM_THRESHOLD, _ALWAYS_BYTES)
    return bool(
        kept
        and (
            libc.mallopt(_M_MMAP_THRESHOLD, _ALWAYS_BYTES)
            or libc.mallopt(_M_MMAP_THRESHOLD, _OLD_GLIBC_BYTES)
        )
    )


def give_back_freed_memory() -> bool:
    """From now on blocks of 256 KiB and more go back at once; False where that cannot be set.

    Nothing changes if the user has set glibc's own variables.
    """
    libc = _glibc()
    if libc is None:
        return False
    set_so = libc.mallopt(_M_TRIM_THRESHOLD, _USUAL_TRIM_BYTES)
    set_so = libc.mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES) and set_so
    libc.malloc_trim(0)  # what was kept until now
    return bool(set_so)


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and the user has not set it up."""
    if sys.platform != "linux" or any(os.environ.get(name) for name in USERS_SETTINGS):
        return None
    try:
        libc = ctypes.CDLL(None)
        _ = libc.mallopt, libc.malloc_trim
    except (OSError, AttributeError):  # another C library
        return None
    return libc
