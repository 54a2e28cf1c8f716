"""The launcher's side of forking: starts the template process and follows the workers it forks.

Nothing here waits for the template: workers get their process ids, and later their exit codes, as its
reports arrive. The template is the workers' parent, so it is the one that learns how they ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

import msgspec

from echelon.observe.run_folder import RunFolder
from echelon.start.command import WorkerCommand
from echelon.start.input import WorkerInput
from echelon.start.template import ForkRequest

CAN_FORK = sys.platform == "linux"  # elsewhere system libraries break in a forked child
_POLL_S = 0.02


class Template:
    """The template process of one run."""

    def __init__(self, folder: RunFolder, commands: Sequence[WorkerCommand], given: WorkerInput) -> None:
        self.ranks = [command.rank for command in commands]
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.refused: set[int] = set()
        self._unread = b""
        self._reports, reports = os.pipe()
        os.set_blocking(self._reports, False)
        try:
            self._process = _start(folder, commands, given, reports)
        except BaseException:
            os.close(self._reports)
            raise
        finally:
            os.close(reports)

    @property
    def is_forking(self) -> bool:
        """Whether workers are still to be forked."""
        self.poll()
        return not self.pids.keys() | self.codes.keys() | self.refused >= set(self.ranks)

    def poll(self) -> None:
        """Read the reports that have arrived."""
        while self._reports >= 0:
            try:
                data = os.read(self._reports, 65536)
            except BlockingIOError:
                return
            if not data:
                self._conclude()
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._note(line.decode())

    def _note(self, line: str) -> None:
        match line.split():
            case ["started", rank, pid]:
                self.pids[int(rank)] = int(pid)
            case ["ended", rank, code]:
                self.codes[int(rank)] = int(code)
            case ["refused", rank]:
                self.refused.add(int(rank))

    def _conclude(self) -> None:
        """Note the end of the template. The kernel kills the workers that it leaves."""
        os.close(self._reports)
        self._reports = -1
        for rank in self.pids:
            self.codes.setdefault(rank, -signal.SIGKILL)
        self.refused |= set(self.ranks) - self.codes.keys()

    def end(self, grace_s: float = 0.0) -> None:
        """Wait until every forked worker has ended; after `grace_s`, kill the template and its workers."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        while self._reports >= 0:
            self.poll()
            time.sleep(0 if self._reports < 0 else _POLL_S)
        self.codes |= dict.fromkeys(self.refused, -signal.SIGKILL)
        self.refused.clear()


class ForkedWorker:
    """One worker that the template forks; as much of `subprocess.Popen` as the launcher needs."""

    def __init__(self, template: Template, rank: int) -> None:
        self._template = template
        self._rank = rank

    @property
    def pid(self) -> int | None:
        """Its process id; None as long as it has not been forked."""
        return self._template.pids.get(self._rank)

    def poll(self) -> int | None:
        """Its exit code, if it has ended; negative is a signal."""
        self._template.poll()
        return self._template.codes.get(self._rank)

    def wait(self) -> int:
        """Wait until it has ended; returns its exit code."""
        while (code := self.poll()) is None:
            time.sleep(_POLL_S)
        return code


def _start(
    folder: RunFolder, commands: Sequence[WorkerCommand], given: WorkerInput, reports: int
) -> subprocess.Popen[bytes]:
    """Start the template as the first worker would be started: what torch prints is in that one's log."""
    first = commands[0]
    with tempfile.TemporaryFile() as requests, folder.log_of(first.rank).open("ab") as log:
        _write_requests(requests, folder, commands, given)
        fds = (requests.fileno(), reports)
        return subprocess.Popen(
            [sys.executable, "-m", "echelon.start.template", *map(str, fds), *first.program],
            env=dict(first.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(*fds, *{given.of(command.rank) for command in commands}),
        )


def _write_requests(
    file: IO[bytes], folder: RunFolder, commands: Sequence[WorkerCommand], given: WorkerInput
) -> None:
    requests = [
        ForkRequest(
            rank=command.rank,
            program=[os.fsencode(word) for word in command.program],
            env={os.fsencode(key): os.fsencode(value) for key, value in command.env.items()},
            log=os.fsencode(folder.log_of(command.rank)),
            stdin_fd=given.of(command.rank),
        )
        for command in commands
    ]
    file.write(msgspec.msgpack.encode(requests))
    file.flush()
    file.seek(0)
