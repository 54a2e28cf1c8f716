"""A worker's output goes to its log; what does not fit on the disk is lost, and the worker goes on.

Without this, `print` raises OSError once the disk is full, and training ends because of a log.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from typing import Any, TextIO

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LogFile(io.FileIO):
    """The file behind stdout or stderr. On a full disk it takes everything and keeps nothing."""

    def write(self, data: Any) -> int:
        """Write what fits; the rest is lost if the disk is full."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return len(memoryview(data).cast("B"))


def survive_a_full_disk() -> None:
    """Let this process's prints succeed although its log, a file, cannot grow."""
    sys.stdout = _surviving(sys.stdout)
    sys.stderr = _surviving(sys.stderr)


def _surviving(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        return stream
    stream.flush()
    raw = LogFile(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
