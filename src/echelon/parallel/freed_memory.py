"""Does memory that is freed go back to the system?

glibc keeps freed blocks for later, also large ones once a few have been freed. A worker that gathers and
gives back parameters all the time would then hold several times of what it uses. With a fixed threshold
large blocks are mappings of their own, which go back when they are freed.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_THRESHOLD_BYTES = 256 * 1024
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def give_back_freed_memory() -> bool:
    """From now on blocks of 256 KiB and more go back at once; False where that cannot be set.

    Nothing changes if the user has set glibc's own variables.
    """
    if sys.platform != "linux" or any(os.environ.get(name) for name in _SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES))
