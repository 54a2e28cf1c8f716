"""How Echelon's warnings in a worker reach the user: in the worker's log, and as notes to the launcher.

A user sees the leader's log only, so a warning of another worker would be lost in a file. Only Echelon's
own logger has this handler: the script sets up logging as if it had been started by itself.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from echelon.observe.events import Noted, encode


class WarningHandler(logging.Handler):
    """Prints warnings, unless the script's own handlers do, and adds them to the worker's events."""

    def __init__(self, rank: int, events: Path) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        self._rank = rank
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        """Handle one warning. It never ends the script, as no handler does."""
        try:
            if not _script_prints_it() and sys.stderr is not None:
                sys.stderr.write(f"{self.format(record)}\n")
                sys.stderr.flush()
            if not getattr(record, "is_noted", False):  # the session has done it, in the same words
                note = Noted(t=time.time(), rank=self._rank, text=record.getMessage(), warning=True)
                self._append(encode(note) + b"\n")
        except (OSError, TypeError, ValueError):
            self.handleError(record)

    def _append(self, line: bytes) -> None:
        """In one write, between those of the worker's recorder; a full disk is no reason to say more."""
        try:
            events = os.open(self._events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:
            return
        try:
            os.write(events, line)
        except OSError:
            return
        finally:
            os.close(events)


def _script_prints_it() -> bool:
    """Whether a handler that the script has set up prints warnings."""
    return any(
        isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
        and handler.level <= logging.WARNING
        for handler in logging.getLogger().handlers
    )
