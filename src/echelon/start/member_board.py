"""How do the launcher and the members of a run see each other, beside requests and answers?

The launcher publishes two numbers that all members see without a message (train/admission.py), sees how far
each member is (train/progress.py), and is asked over connections that members open. Members of this machine
map files, and reach a socket; `FileBoard` has them. Those of other machines do the same there: their agents
pass everything on (agents/board.py).
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

import psutil  # type: ignore[import-untyped]

from echelon.membership.stuck import WorkerSeen
from echelon.train.admission import ADMISSION_VARIABLE, AdmissionFlag
from echelon.train.progress import PROGRESS_VARIABLE, ProgressTable
from echelon.train.service import ADDRESS_VARIABLE

Serve = Callable[[socket.socket], None]


class MemberBoard(Protocol):
    """What the launcher and the members of one run share."""

    @property
    def environment(self) -> dict[str, str]:
        """What workers that this process starts need to find it."""

    def open(self, serve: Serve) -> None:
        """Answer members from now on: `serve` answers one connection, in a thread of its own."""

    def publish(self, waiting: int, after_round: int) -> None:
        """Let all members see these numbers; those that ask the launcher later have seen them before."""

    def settle(self, limit_s: float) -> None:
        """Wait until all members see what was published last, for at most so long."""

    @property
    def is_current(self) -> bool:
        """Whether the launcher sees all members as they are now."""

    def read(self, slot: int) -> WorkerSeen | None:
        """How far a member is; None if it has not said so."""

    def stopped(self, slots: Collection[int]) -> list[int]:
        """Which of these members' processes are stopped now."""

    def clear(self, slot: int) -> None:
        """The slot's worker has ended."""

    def close(self) -> None:
        """Answer nobody any more."""


class FileBoard:
    """For members on this machine. `file`: where they see the two numbers; progress is beside it.

    `local`: workers reach the launcher at 127.0.0.1; those of a lab have networks of their own.
    """

    is_current = True

    def __init__(self, file: Path, *, local: bool = True) -> None:
        self._flag = AdmissionFlag.create(file)
        self._table = ProgressTable(file.with_name("progress"))
        self._folder = None if local else Path(tempfile.mkdtemp(prefix="echelon-"))
        self._listener = _listener(self._folder)

    @property
    def environment(self) -> dict[str, str]:
        """The address and the two files."""
        name = self._listener.getsockname()
        return {
            ADDRESS_VARIABLE: name if isinstance(name, str) else f"{name[0]}:{name[1]}",
            ADMISSION_VARIABLE: str(self._flag.file),
            PROGRESS_VARIABLE: str(self._table.file),
        }

    def open(self, serve: Serve) -> None:
        """In a thread for each connection."""
        threading.Thread(target=self._accept, args=(serve,), name="echelon-members", daemon=True).start()

    def _accept(self, serve: Serve) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=serve, args=(sock,), name="echelon-member", daemon=True).start()

    def publish(self, waiting: int, after_round: int) -> None:
        """In the file, which members map."""
        self._flag.waiting, self._flag.round = waiting, after_round

    def settle(self, limit_s: float) -> None:
        """They see it at once."""

    def read(self, slot: int) -> WorkerSeen | None:
        """From the file."""
        found = self._table.read(slot)
        return found[1] if found is not None else None

    def stopped(self, slots: Collection[int]) -> list[int]:
        """As the process table says."""
        return [slot for slot in slots if is_stopped(self._table, slot)]

    def clear(self, slot: int) -> None:
        """In the file."""
        self._table.clear(slot)

    def close(self) -> None:
        """Remove the files; those who map them keep them."""
        self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._flag.remove()
        self._table.remove()


def is_stopped(table: ProgressTable, slot: int) -> bool:
    """Whether the process of a slot, which is on this machine, is stopped now."""
    found = table.read(slot)
    try:
        return found is not None and psutil.Process(found[0]).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _listener(folder: Path | None) -> socket.socket:
    """At a port of this machine; or in a folder, because network namespaces share files but no ports."""
    if folder is None:
        return socket.create_server(("127.0.0.1", 0))
    return socket_in(folder)


def socket_in(folder: Path) -> socket.socket:
    """A listener whose address is a path in a folder."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "members"))
    listener.listen()
    return listener
