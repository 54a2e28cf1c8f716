"""What ends the processes of a Ray that a launcher has started, if the launcher itself is gone?

    python -I -S sweeper.py FOLDER

Ray's own processes see to it that most of them end with the program that started them, but some last for
minutes if that program is killed. This one waits until its standard input is closed, which the launcher's
end does, however it ends. Then it kills the processes of the Ray whose temporary folder is FOLDER, and
removes the folder. It uses only the standard library, and starts in a few milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_SWEEP_S = 10.0
_QUIET_S = 0.5  # a process that is just being started shows up in this time
_POLL_S = 0.05
_TITLE = b"ray::"  # Ray's workers and agents replace their command lines by this and a name


def main() -> None:
    """Wait for the launcher's end, then sweep."""
    folder = sys.argv[1]
    while os.read(0, 1 << 10):
        pass
    until = time.monotonic() + _SWEEP_S
    quiet_since = time.monotonic()
    while time.monotonic() < min(until, quiet_since + _QUIET_S):
        for pid in processes_of(folder):
            quiet_since = time.monotonic()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: str) -> Iterator[int]:
    """The processes of the Ray with this temporary folder."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes()
            if _is_rays(words, folder) or (words.startswith(_TITLE) and _uses(entry, folder)):
                yield int(entry.name)


def _is_rays(words: bytes, folder: str) -> bool:
    """A program of Ray's own that was told the folder: not a user's editor of a file there."""
    return f"{folder}/".encode() in words and b"/ray/" in words.replace(folder.encode(), b"")


def _uses(entry: Path, folder: str) -> bool:
    """Its logs are in the folder."""
    for handle in (entry / "fd").iterdir():
        with contextlib.suppress(OSError):
            if str(handle.readlink()).startswith(f"{folder}/"):
                return True
    return False


if __name__ == "__main__":
    main()
