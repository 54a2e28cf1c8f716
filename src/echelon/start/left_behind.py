"""Which processes has a run left behind, and how are they ended, also if the launcher is killed?

A worker leads a process group, so what it starts ends with it. But a child may begin a session of its own,
and outlives its worker then; and the kernel ends workers of a killed launcher, not their children. All of
them have inherited the run's folder in their environment (ECHELON_RUN), whatever their parent or session
is. A small process holds one end of a pipe, and the other end closes when the run ends or its launcher is
killed; then it ends all processes with that mark.

Linux only. A child that clears its environment is not found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Several rounds: a process may start another one while it is being ended. The environment of a process that
# has ended, and that nobody has waited for, is empty.
_GUARDIAN = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP, signal.SIGTERM})
os.read(0, 1)
mark = os.fsencode(sys.argv[1])
for _ in range(5):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open("/proc/" + name + "/environ", "rb") as file:
                    if mark in file.read().split(b"\\0"):
                        found.append(int(name))
            except OSError:
                pass
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
    if not found:
        break
"""


def mark_of(folder: Path) -> str:
    """The entry of the environment that all processes of a run have."""
    return f"ECHELON_RUN={folder}"


class Guardian:
    """The process that ends what is left of a run if this process is killed."""

    def __init__(self, folder: Path) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform != "linux":
            return
        environment = {key: value for key, value in os.environ.items() if key != "ECHELON_RUN"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _GUARDIAN, mark_of(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        except OSError:  # no process can be started: the workers cannot either, and that is said
            return

    def end(self) -> None:
        """Close the pipe: it ends what is left, and itself."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
            self._process = None
