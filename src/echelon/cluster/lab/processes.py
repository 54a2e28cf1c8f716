"""Finds and ends the processes of a node. The kernel is asked each time; nothing is remembered."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

_LOOK_EVERY_S = 0.02


def in_namespaces(files: Iterable[Path]) -> set[int]:
    """The processes whose network namespace is one of these files."""
    wanted = set()
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            wanted.add((stat.st_dev, stat.st_ino))
    found: set[int] = set()
    if not wanted:
        return found
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                stat = Path(entry.path, "ns", "net").stat()
                if (stat.st_dev, stat.st_ino) in wanted:
                    found.add(int(entry.name))
    return found


def command_of(pid: int) -> str:
    """The command line of a process; empty if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return " ".join(word.decode(errors="replace") for word in words if word)


def send(pids: Iterable[int], *signals: signal.Signals) -> None:
    """Send signals to processes; ignores processes that are gone."""
    for pid in pids:
        for number in signals:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def end(find: Callable[[], set[int]], *, grace_s: float = 2.0, deadline_s: float = 8.0) -> set[int]:
    """End all processes that `find` returns, by SIGTERM, then SIGKILL. Returns those that remain."""
    started = time.monotonic()
    signalled: set[int] = set()
    while pids := find() - {os.getpid()}:
        elapsed_s = time.monotonic() - started
        if elapsed_s > deadline_s:
            return pids
        if elapsed_s > grace_s:
            send(pids, signal.SIGKILL)
        else:
            # A stopped process handles a signal only after it is continued.
            send(pids - signalled, signal.SIGTERM, signal.SIGCONT)
            signalled |= pids
        time.sleep(_LOOK_EVERY_S)
    return set()
