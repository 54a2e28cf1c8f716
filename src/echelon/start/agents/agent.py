"""The process on another machine: starts workers there, sends back what they write, ends with its launcher.

    python -m echelon.start.agents.agent

It talks over its standard input and output, or calls its launcher back if it has an invitation (see
callback.py). The launcher's end, a closed connection, a silence, SIGTERM, or the end of the engine's
process that started it ends all workers. A run's folder is a temporary one; the launcher has the whole
record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import FrameType

from echelon.cluster.machine import machine_key, network_key, usable_cores
from echelon.errors import EchelonError, LaunchError, WorkerError
from echelon.observe.growth import FolderTail
from echelon.observe.run_folder import RunFolder
from echelon.start.agents.callback import INVITATION_VARIABLE, Invitation, call_back
from echelon.start.agents.channel import Channel
from echelon.start.agents.environment import devices, granted_cores, without_task
from echelon.start.agents.member_relay import MemberRelay
from echelon.start.agents.orphan import end_with_parent
from echelon.start.agents.protocol import (
    AgentWorker,
    Alive,
    Begin,
    Describe,
    EndWorker,
    Finish,
    Interrupt,
    Introduction,
    JoinRequest,
    Listen,
    MemberGone,
    MemberSaid,
    Message,
    Publish,
    Reached,
    Refusal,
    StartAgain,
    TryReach,
    WorkerEnded,
)
from echelon.start.agents.reach import ReachListeners, attempt, description, own_addresses
from echelon.start.command import WorkerCommand
from echelon.start.failure import Failure, read_failures
from echelon.start.further import digest_of
from echelon.start.processes import WorkerProcesses

SILENCE_S = 15.0
_LATER_S = 5.0  # workers notice that a machine is silent when the launcher knows that it is lost
ALIVE_S = 2.0
_POLL_S = 0.2  # also how often files are followed: each look takes time from the workers
_LOSS_S = 0.05  # how often to look for lost workers, without which others want to go on
_MOST_UNSENT_BYTES = 8 << 20
_STARTED_AGAIN_S = 3.0
_PREFIX = "echelon-agent-"
_NEW_S = 60.0
_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def introduction(order: int = 0) -> Introduction:
    """This process, as the launcher has to know it."""
    return Introduction(
        host=socket.gethostname(),
        pid=os.getpid(),
        cores=granted_cores(os.environ, usable_cores()),
        machine=machine_key(),
        network=network_key(),
        order=order,
        cpus=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        devices=devices(os.environ),
        echelon=metadata.version("echelon"),
        python=platform.python_version(),
        torch=metadata.version("torch"),
        addresses=own_addresses(),
    )


class Agent:
    """One agent, from its start to its end."""

    def __init__(
        self,
        channel: Channel,
        order: int = 0,
        *,
        asks: JoinRequest | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`asks`: the run goes on already, and this machine asks to join it. `env` is for its workers."""
        self._env = dict(env or {})
        self._folder: RunFolder | None = None
        self.failures: list[Failure] = []
        self._channel = channel
        self._asks = asks
        self.refusal: Refusal | None = None
        self.codes: dict[int, int] = {}
        self.asked_to_end = 0  # how often this process's user has asked its workers to leave
        self._asked_before = 0
        self._all_ended_at: float | None = None
        self._order = order
        self._processes: WorkerProcesses | None = None
        self._tail: FolderTail | None = None
        self._ended: set[int] = set()
        self._listeners = ReachListeners()
        self._finished = False
        self._told_at = 0.0
        self._reported_at = 0.0
        self._members: MemberRelay | None = None
        self._stack = contextlib.ExitStack()
        self._stack.callback(self._listeners.close)

    def run(self) -> None:
        """Serve the launcher until it is done, or gone."""
        self._channel.send(introduction(self._order))
        if self._asks is not None:
            self._channel.send(self._asks)
        with self._stack:
            try:
                while not self._finished:
                    for message in self._wait():
                        self._hear(message)
                    if self._members is not None:
                        self._members.carry()
                    self._report()
                    self._check_silence()
                    if self._asks is not None:
                        self._leave_in_order()
            except WorkerError:
                return  # the launcher is gone, and so are the workers when the stack is left
            finally:
                if self._folder is not None:
                    self.failures = read_failures(self._folder)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)  # an engine may send several: clean up once

    def _wait(self) -> list[Message]:
        """Until the launcher or a member says something, or it is time to look at the workers."""
        if self._members is None:
            return self._channel.poll(_POLL_S)
        return self._channel.poll(_LOSS_S, read=self._members.sockets, write=self._members.blocked)

    def _hear(self, message: Message) -> None:
        match message:
            case Begin():
                try:
                    self._begin(message)
                except EchelonError as error:
                    self.refusal = Refusal(message=error.message, where=error.where, fix=error.fix)
                    self._channel.send(self.refusal)
                    self._finished = self._asks is not None
                    self._channel.flush(SILENCE_S)
            case Refusal():
                self.refusal, self._finished = message, True
            case Describe():
                self._channel.send(description())
            case Listen():
                self._channel.send(self._listeners.open(message.port, steady=message.steady))
            case TryReach():
                self._channel.send(Reached(attempt(message)))
            case Interrupt(saves):
                if self._processes is not None and saves:
                    self._processes.terminate()
                elif self._processes is not None:
                    self._processes.interrupt()
            case MemberSaid() | MemberGone() | Publish() if self._members is not None:
                self._members.hear(message)
            case EndWorker(rank) if self._processes is not None:
                self._processes.kill(rank)
            case StartAgain(rank) if self._processes is not None:
                self._start_again(self._processes, rank)
            case Finish():
                self._finish()
            case _:
                return  # Alive: that it came is all

    def _begin(self, begin: Begin) -> None:
        self._listeners.close()  # a port of theirs is the run's from now on
        root = Path(self._stack.enter_context(_temporary_folder()))
        folder = RunFolder(root / begin.run).with_subfolders()
        self._folder = folder
        folder.config.write_text(begin.config)
        folder.plan.write_text(begin.plan)
        if begin.call:
            folder.call.write_bytes(begin.call)
            folder.results.mkdir()
        place = Path(begin.cwd).expanduser()
        if begin.files:
            place = root / "files"
            _unpack(begin.files, place)
        try:
            os.chdir(place)
        except OSError as error:
            raise LaunchError(
                f"the folder {place} cannot be entered: {error.strerror}",
                where=socket.gethostname(),
                fix="make the same folder there, or copy the script with --copy",
            ) from error
        _check_program(begin.workers, place)
        _check_digests(begin.digests, place)
        self._tail = FolderTail(folder.path)
        found: dict[str, str] = {}
        if begin.members:
            self._members = MemberRelay(root, self._channel.send, silent_s=SILENCE_S + _LATER_S)
            self._stack.callback(self._members.close)
            found = {**self._members.environment, **self._env}
        commands = [_command(worker, folder, found) for worker in begin.workers]
        self._processes = WorkerProcesses(folder, commands)
        self._stack.callback(self._processes.end)

    def _start_again(self, processes: WorkerProcesses, rank: int) -> None:
        assert self._members is not None
        self._members.clear(rank)
        self._ended.discard(rank)
        try:
            processes.restart(rank)
        except LaunchError:  # the process that has ended before is still the rank's
            return

    def _report(self, *, last: bool = False) -> None:
        if self._processes is None or self._tail is None:
            return
        self.codes = codes = self._processes.exit_codes()  # before the files, which are complete then
        now = time.monotonic()
        if not last and codes.keys() <= self._ended and now - self._reported_at < _POLL_S:
            return
        self._reported_at = now
        if self._members is not None:
            self._channel.send(self._members.progress([r for r in self._processes.ranks if r not in codes]))
        self._send_files()
        for rank, code in codes.items():
            if rank not in self._ended and self._channel.unsent_bytes < _MOST_UNSENT_BYTES:
                self._ended.add(rank)
                self._channel.send(WorkerEnded(rank, code))

    def _send_files(self) -> None:
        assert self._tail is not None
        if self._channel.unsent_bytes > _MOST_UNSENT_BYTES:
            return
        for part in self._tail.grown():
            self._channel.send(part)

    def _check_silence(self) -> None:
        now = time.monotonic()
        if now - self._told_at > ALIVE_S:
            self._told_at = now
            self._channel.send(Alive())
        if now - self._channel.heard_at > SILENCE_S:
            self._finished = True

    def _leave_in_order(self) -> None:
        """Ask the workers to leave when the user of this process says so, and end some time after them."""
        if self._processes is None:
            self._finished |= self.asked_to_end > 0
            return
        if self.asked_to_end > self._asked_before:
            self._asked_before = self.asked_to_end
            if self.asked_to_end > 1:
                self._finished = True
            self._processes.terminate()
        if not self._processes.all_done_so_far():
            self._all_ended_at = None
        elif self._all_ended_at is None:
            self._all_ended_at = time.monotonic()
        elif time.monotonic() - self._all_ended_at > _STARTED_AGAIN_S:
            self._finished = True

    def _finish(self) -> None:
        """End the workers, and send what they wrote last."""
        self._finished = True
        if self._processes is not None:
            self._processes.end()
            self._report(last=True)
            self._channel.flush(SILENCE_S)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder that is removed at the end; those that killed agents have left are removed now.

    The folder of an agent that is alive is locked, whatever host name or process ids it has. One that is
    new may not be locked yet.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _NEW_S:
                with _lock(left):
                    shutil.rmtree(left, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with _lock(path):
            yield str(path)
    finally:
        os.chdir("/")
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder; OSError if another process does."""
    held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)


def _unpack(files: dict[str, bytes], place: Path) -> None:
    for name, data in files.items():
        path = (place / name).resolve()
        if not path.is_relative_to(place.resolve()):
            raise LaunchError(f"{name!r} is outside of the folder that is copied", where="--copy")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _check_program(workers: list[AgentWorker], place: Path) -> None:
    """Refuse a script that is not there, before any worker waits for it."""
    for worker in workers:
        script = worker.program[0]
        if script != "-m" and not (place / script).is_file():
            raise LaunchError(
                f"there is no {script} in {place} on {socket.gethostname()}",
                where=f"rank {worker.rank}",
                fix="copy it there, or let Echelon do it with --copy",
            )


def _check_digests(digests: dict[str, str], place: Path) -> None:
    """Refuse files that differ from those of the run."""
    differing = [name for name, digest in digests.items() if digest_of(place / name) != digest]
    if differing:
        raise LaunchError(
            f"{', '.join(differing)} in {place.resolve()} on {socket.gethostname()} "
            f"{'are' if len(differing) > 1 else 'is'} missing or not the same as where the run was started",
            where="echelon join",
            fix="copy the files from there, and join in the folder in which the run was started",
        )


def _command(worker: AgentWorker, folder: RunFolder, found: dict[str, str]) -> WorkerCommand:
    env = {
        **without_task(os.environ),
        **worker.env,
        **found,
        "PYTHONUNBUFFERED": "1",
        "ECHELON_RUN": str(folder.path),
        "ECHELON_LAUNCHER": str(os.getpid()),
    }
    argv = [sys.executable, "-m", "echelon.start.worker", *worker.program]
    program = worker.program if worker.fork else ()
    return WorkerCommand(rank=worker.rank, node=worker.node, argv=argv, env=env, program=program)


def _leave(number: int, frame: FrameType | None) -> None:
    """End the workers and remove their folder on the way out; only the first signal counts."""
    for one in _ENDING:
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    """Talk over a connection to the launcher; without an invitation, over standard input and output."""
    # An engine may block or ignore some of them, and so would the workers.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in _ENDING:
        signal.signal(number, _leave)
    text = os.environ.pop(INVITATION_VARIABLE, "")
    if text:
        invitation = Invitation.decode(text)
        os.environ.update(invitation.env)
        end_with_parent()
        Agent(call_back(invitation), invitation.order_in(os.environ)).run()
        return
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)  # nothing else may write to the launcher
    Agent(Channel(incoming, outgoing, peer="the launcher")).run()


if __name__ == "__main__":
    main()
