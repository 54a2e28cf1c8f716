"""How does a process end with the one that started it, even if that is killed? The kernel signals it.

Linux only; elsewhere agents notice the end of their connection. Nothing here runs between fork and exec: a
program that computes with threads could hang there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_THEN_RUN = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGTERM)})
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def end_with_parent() -> None:
    """Have the kernel send this process SIGTERM when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def ending_with_this(argv: Sequence[str]) -> list[str]:
    """The command, to be started by this thread, such that it gets SIGTERM when the thread ends."""
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _THEN_RUN, str(os.getpid()), *argv]
