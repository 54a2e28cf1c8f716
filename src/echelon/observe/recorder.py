"""Writes one worker's events without slowing its steps down.

Events are kept in memory and written at most five times a second, in one write. Recording never ends
a run: if the disk is full, recording stops with one warning in the log, and training goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from io import FileIO
from pathlib import Path
from types import TracebackType

from echelon.observe.events import Event, encode

_FLUSH_EVERY_S = 0.2
_log = logging.getLogger(__name__)


class Recorder:
    """Appends events to one file, from any thread."""

    def __init__(self, file: Path | None) -> None:
        self._file: FileIO | None = None
        try:
            self._file = file.open("ab", buffering=0) if file is not None else None
        except OSError as error:
            _log.warning("cannot record events, training goes on: %s", error)
        self._pending: list[Event] = []
        self._flushed = time.monotonic()
        self._writing = threading.Lock()

    def emit(self, event: Event) -> None:
        """Keep the event; write all pending ones if the last write was long enough ago."""
        if self._file is None:
            return
        with self._writing:
            self._pending.append(event)
            if time.monotonic() - self._flushed >= _FLUSH_EVERY_S:
                self._write()

    def flush(self) -> None:
        """Write all pending events."""
        with self._writing:
            self._write()

    def _write(self) -> None:
        if self._file is None or not self._pending:
            return
        data = b"".join(encode(event) + b"\n" for event in self._pending)
        self._pending.clear()
        try:
            while data:  # an unbuffered write may be partial
                data = data[self._file.write(data) :]
        except OSError as error:
            _log.warning("cannot record more events, training goes on: %s: %s", self._file.name, error)
            self._file.close()
            self._file = None
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write all pending events and close the file."""
        with self._writing:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
