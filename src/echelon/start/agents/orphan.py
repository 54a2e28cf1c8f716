"""How does a process end with the one that started it, even if that is killed? The kernel signals it.

Linux only.
"""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before a fork, not after


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the thread that started it ends.

    Elsewhere an agent notices the end of its connection.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
