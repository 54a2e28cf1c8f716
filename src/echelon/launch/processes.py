"""The worker processes of one run: start them, watch them, end them. None is left behind.

Every worker is the head of a process group of its own, so that what it starts ends with it. All that a
worker prints goes straight to its log file; nothing it does can block the launcher, or be blocked by it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from echelon.errors import LaunchError
from echelon.launch.failure import Failure, first, from_exit
from echelon.observe.run_folder import RunFolder

_GRACE_S = 0.3
_SETTLE_S = 0.4
_LAST_WORDS_S = 2.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """How one worker is started."""

    rank: int
    node: str
    argv: Sequence[str]
    env: Mapping[str, str]


class WorkerProcesses:
    """Workers that were started together and end together."""

    def __init__(self, folder: RunFolder, commands: Sequence[WorkerCommand]) -> None:
        self._folder = folder
        self._nodes = {command.rank: command.node for command in commands}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for command in commands:
                self._processes[command.rank] = self._start(command)
        except BaseException:
            self.end()
            raise

    def _start(self, command: WorkerCommand) -> subprocess.Popen[bytes]:
        try:
            with self._folder.log_of(command.rank).open("wb") as log:
                return subprocess.Popen(
                    command.argv,
                    env=dict(command.env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(
                f"rank {command.rank} on {command.node} could not be started: {error}",
                where=" ".join(command.argv[:3]),
            ) from error

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self._nodes)

    def node_of(self, rank: int) -> str:
        """Where a worker runs."""
        return self._nodes[rank]

    def pids_on(self, node: str) -> list[int]:
        """The processes that head the workers of one node."""
        return [p.pid for rank, p in self._processes.items() if self._nodes[rank] == node]

    def exit_codes(self) -> dict[int, int]:
        """Those that have ended, with their exit codes; negative is a signal."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def all_done(self) -> bool:
        """Whether every worker has ended."""
        return len(self.exit_codes()) == self.size

    def failure(self) -> Failure | None:
        """The failure that the others follow from, once any worker has failed.

        A worker that fails because of another may be the first to end, so the other gets a moment. All
        others get one as well, to write in their logs whom they have lost.
        """
        found = self._failures()
        if not found:
            return None
        deadline = time.monotonic() + _SETTLE_S
        while all(failure.consequence for failure in found) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = self._failures()
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self.all_done_so_far() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return first(found)

    def _failures(self) -> list[Failure]:
        return [
            self._reason(rank, code) for rank, code in self.exit_codes().items() if code not in (0, None)
        ]

    def _reason(self, rank: int, code: int) -> Failure:
        try:
            return msgspec.json.decode(self._folder.error_of(rank).read_bytes(), type=Failure)
        except (OSError, msgspec.DecodeError):
            log = self._folder.log_of(rank)
            ended = log.stat().st_mtime if log.exists() else time.time()
            return from_exit(rank, code, ended)

    def interrupt(self) -> None:
        """Pass Ctrl-C on."""
        self._signal(signal.SIGINT)

    def end(self, grace_s: float = _GRACE_S) -> None:
        """End every worker and all it started: asked first, then made to."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while not self.all_done_so_far() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for process in self._processes.values():
            _kill_group(process.pid, signal.SIGKILL)  # also what a worker that has ended left behind
        for process in self._processes.values():
            process.wait()

    def all_done_so_far(self) -> bool:
        """Whether every worker that was started has ended."""
        return len(self.exit_codes()) == len(self._processes)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                _kill_group(process.pid, number)

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _kill_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


class LogTail:
    """What was added to a log since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> bytes:
        """The new bytes, as they are."""
        try:
            with self._path.open("rb") as log:
                log.seek(self._at)
                data = log.read()
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data
