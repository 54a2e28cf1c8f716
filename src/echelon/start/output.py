"""The leader's output as the launcher shows it: everything, except an error that is shown at the end."""

from __future__ import annotations

from pathlib import Path

from echelon.observe.run_folder import RunFolder
from echelon.start.failure import Failure, is_alike, read_failure


class LogTail:
    """Reads what was added to a log since the last read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> bytes:
        """The new bytes, unchanged."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._at)
                data = log.read()
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data


class LeaderOutput:
    """The leader's log while it grows.

    A worker that fails writes its error file before it prints the error. From then on the output is held
    back, because the launcher prints the error of the worker that failed first: it must not appear twice,
    nor must an error of the leader that only says the same, or that another worker is gone.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._leader = 0
        self._tail = LogTail(folder.log_of(0))
        self._error = folder.error_of(0)
        self._held = b""

    def follow(self, leader: int) -> None:
        """Another worker leads from now on: show what it prints after this."""
        if leader != self._leader:
            self._held += self._tail.read()
            self._leader = leader
            self._tail = LogTail(self._folder.log_of(leader))
            self._tail.read()
            self._error = self._folder.error_of(leader)

    def read(self) -> bytes:
        """The new output; nothing after the leader has failed."""
        data = self._held + self._tail.read()
        self._held = data if self._error.exists() else b""
        return b"" if self._held else data

    def rest(self, failure: Failure | None) -> bytes:
        """What was held back; of the leader's own error, only what `failure` does not say."""
        data = self._held + self._tail.read()
        self._held = b""
        own = read_failure(self._error)
        if failure is None or own is None or not (own.consequence or is_alike(own, failure)):
            return data
        for text in (_with_rank(own.text), own.text):
            data = data.replace(text.encode(errors="backslashreplace"), b"", 1)
        return data


def _with_rank(text: str) -> str:
    """As torch prints an error after `init_process_group`."""
    return "\n".join(f"[rank0]: {line}" if line else "" for line in text.split("\n"))
