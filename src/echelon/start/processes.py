"""The worker processes of one run: start them, watch them, end them. None is left behind.

Every worker leads a process group of its own, so that the processes it starts end with it; those in
sessions of their own, and those of a launcher that is killed, are ended by left_behind.py. A worker's
output goes straight to its log file, so neither worker nor launcher can block the other; what it reads is
said in input.py.

Several workers on this machine are forked from one template process that has imported torch; see
template.py. A worker that cannot be forked is started by exec.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import TracebackType

from echelon.config.exit_codes import SAVED_AND_STOPPED
from echelon.errors import LaunchError
from echelon.observe.run_folder import RunFolder
from echelon.start.command import WorkerCommand
from echelon.start.failure import Failure, decide, evidence
from echelon.start.forked import CAN_FORK, ForkedWorker, Template
from echelon.start.input import WorkerInput
from echelon.start.left_behind import Guardian
from echelon.train.service import RETURNS_VARIABLE

_GRACE_S = 0.3
_SETTLE_S = 0.4
_LAST_LOGS_S = 2.0
_POLL_S = 0.02


class WorkerProcesses:
    """Workers that were started together and end together."""

    def __init__(
        self, folder: RunFolder, commands: Sequence[WorkerCommand], *, saves: bool = False
    ) -> None:
        """`saves`: a worker may save and stop, which is no failure."""
        self._folder = folder
        self._fine = (0, SAVED_AND_STOPPED) if saves else (0,)
        self._commands = {command.rank: command for command in commands}
        self._processes: dict[int, subprocess.Popen[bytes] | ForkedWorker] = {}
        self._template: Template | None = None
        self._ending = False
        self.lost: frozenset[int] = frozenset()  # workers without which the others go on
        self.excused: frozenset[int] = frozenset()  # workers whose failures do not end the run
        self.judged: Collection[int] | None = None  # workers whose ends count so far; None: all
        self._input = WorkerInput()
        self._guardian = Guardian(folder.path)
        forkable = [command for command in commands if command.program]
        try:
            if CAN_FORK and len(forkable) > 1:
                self._fork(forkable)
            for command in commands:
                if command.rank not in self._processes:
                    self._processes[command.rank] = self._exec(command)
        except BaseException:
            self.end()
            raise

    def _fork(self, commands: Sequence[WorkerCommand]) -> None:
        try:
            self._template = Template(self._folder, commands, self._input)
        except OSError:
            return  # exec will fail as well, and the error names the worker
        for command in commands:
            self._processes[command.rank] = ForkedWorker(self._template, command.rank)

    def _exec(self, command: WorkerCommand) -> subprocess.Popen[bytes]:
        try:
            with self._folder.log_of(command.rank).open("ab") as log:
                return subprocess.Popen(
                    command.argv,
                    env=dict(command.env),
                    stdin=self._input.of(command.rank),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(
                f"rank {command.rank} on {command.node} could not be started: {error}",
                where=" ".join(command.argv[:3]),
            ) from error

    def _exec_unforked(self) -> None:
        """Start the workers that the template has refused to fork, once it is done with the others."""
        if self._template is None or self._ending or self._template.is_forking:
            return
        while self._template.refused:
            rank = self._template.refused.pop()
            self._processes[rank] = self._exec(self._commands[rank])

    def restart(self, rank: int) -> None:
        """Start a new process in the place of one that has ended."""
        command = self._commands[rank]
        env = {**command.env, RETURNS_VARIABLE: "1"}
        self._processes[rank] = self._exec(replace(command, env=env))

    def add(self, command: WorkerCommand) -> None:
        """Start a further worker."""
        self._commands[command.rank] = command
        self.restart(command.rank)

    def kill(self, rank: int) -> None:
        """End one worker at once."""
        pid = self.pid_of(rank)
        if pid is not None and self._processes[rank].poll() is None:
            _kill_group(pid, signal.SIGKILL)

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self._commands)

    @property
    def ranks(self) -> list[int]:
        """The workers' ranks."""
        return list(self._commands)

    def machine_gone(self, rank: int) -> str:
        """This machine is not out of reach."""
        return ""

    def node_of(self, rank: int) -> str:
        """The node that a worker runs on."""
        return self._commands[rank].node

    def pids_on(self, node: str) -> list[int]:
        """The process ids of one node's workers, as far as they have been started."""
        on_node = (process for rank, process in self._processes.items() if self.node_of(rank) == node)
        return [process.pid for process in on_node if process.pid is not None]

    def pid_of(self, rank: int) -> int | None:
        """A worker's process id; None as long as it has not been started."""
        process = self._processes.get(rank)
        return process.pid if process is not None else None

    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the workers that have ended; negative is a signal."""
        self._exec_unforked()
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def all_done(self) -> bool:
        """Whether every worker has ended; not counting those without which the others go on."""
        return len(self.exit_codes().keys() | self.lost) == self.size

    def failure(self) -> Failure | None:
        """The failure that caused the others, once any worker has failed.

        Workers hand over their errors when they happen, so one that is slow to exit is named as well. A
        worker that fails because of another may be earlier than that one, so the launcher waits a moment
        for it. Then it waits for the rest, so that they can write to their logs which worker they lost.
        """
        found = self._failures()
        if not found:
            return None
        deadline = time.monotonic() + _SETTLE_S
        while all(failure.consequence for failure in found) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            found = self._failures()
        deadline = time.monotonic() + _LAST_LOGS_S
        while not self.all_done_so_far() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return decide(self._failures(), self.exit_codes())

    def _failures(self) -> list[Failure]:
        codes = {
            rank: code
            for rank, code in self.exit_codes().items()
            if rank not in self.excused and (self.judged is None or rank in self.judged)
        }
        found = evidence(self._folder, codes, self._fine)
        return [failure for failure in found if failure.rank not in self.excused]

    def interrupt(self) -> None:
        """Send every worker the signal of Ctrl-C."""
        self._signal(signal.SIGINT)

    def terminate(self) -> None:
        """Ask every worker to save and stop; not the processes that it has started, which load its data."""
        for process in self._processes.values():
            if process.poll() is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    def end(self, grace_s: float = _GRACE_S) -> None:
        """End every worker and the processes it has started: SIGTERM, then SIGKILL."""
        self._ending = True
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while not self.all_done_so_far() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for process in self._processes.values():
            if process.pid is not None:  # also if it has ended: its own processes may be left
                _kill_group(process.pid, signal.SIGKILL)
        if self._template is not None:
            self._template.end(_LAST_LOGS_S)
        for process in self._processes.values():
            process.wait()
        self._guardian.end()
        self._input.close()

    def all_done_so_far(self) -> bool:
        """Whether every worker that was started has ended."""
        return len(self.exit_codes()) == len(self._processes)

    def _signal(self, number: signal.Signals) -> None:
        if self._template is not None and self._template.is_forking:
            self._template.end()  # it is still importing torch
        for process in self._processes.values():
            if process.poll() is None and process.pid is not None:
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
