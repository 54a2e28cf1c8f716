"""Runs a program in the nodes of a lab, with the usual environment variables.

Each node is a machine with one rank: RANK and NODE_RANK count the nodes that the program runs in, in the
given order, WORLD_SIZE is their number, MASTER_ADDR the first one's address. A program and its children are
in a CPU group of their own below the node's, so that nothing outlives the call.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from echelon.cluster.lab.lab import Lab, Seat
from echelon.cluster.lab.processes import end, send
from echelon.cluster.lab.variation import varying
from echelon.errors import LabError

OnLine = Callable[[str, str, str], None]

_LOOK_EVERY_S = 0.03
_GRACE_S = 5.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJob:
    """A command for some nodes of a lab. With `keep_going`, a failure does not end the other nodes."""

    command: Sequence[str]
    nodes: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = 29500
    keep_going: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: the exit code and node of its first failure, or 0 and no node."""

    code: int = 0
    node: str = ""


def run_job(lab: Lab, job: NodeJob, on_line: OnLine) -> JobResult:
    """Run the job on all its nodes at once, until all have ended or one has failed.

    `on_line(node, stream, line)` is called for every line, from several threads but never concurrently;
    stream is "stdout" or "stderr".
    """
    places = list(placements(lab, job))
    with varying(lab), _groups(lab, job) as groups, _signals() as received:
        lines = threading.Lock()
        running: dict[str, subprocess.Popen[str]] = {}
        readers: list[threading.Thread] = []
        try:
            for seat, words, env in places:
                prefix = lab.prefix_of(seat.node, groups[seat.node])
                running[seat.node] = process = _start([*prefix, *words], env, piped=True)
                for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                    args = (pipe, seat.node, stream, on_line, lines)
                    readers.append(threading.Thread(target=_read, args=args, daemon=True))
                    readers[-1].start()
            return _wait(running, received, keep_going=job.keep_going)
        finally:
            _end(lab, groups)
            for process in running.values():
                process.wait()
            for reader in readers:
                reader.join()


def run_attached(lab: Lab, job: NodeJob) -> JobResult:
    """Run the job on its one node with this process's own input and output, as in a terminal."""
    ((seat, words, env),) = placements(lab, job)
    with varying(lab), _groups(lab, job) as groups, _signals() as received:
        process = _start([*lab.prefix_of(seat.node, groups[seat.node]), *words], env, piped=False)
        try:
            with _foreground(process.pid):
                return _wait({seat.node: process}, received, keep_going=True)
        finally:
            _end(lab, groups)
            process.wait()


def placements(lab: Lab, job: NodeJob) -> Iterator[tuple[Seat, list[str], dict[str, str]]]:
    """For each node of a job: its seat, the words of its command, and its environment."""
    chosen = [lab.seats[lab.spec.index_of(node)] for node in job.nodes]
    for rank, seat in enumerate(chosen):
        own = {
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "WORLD_SIZE": str(len(chosen)),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": chosen[0].address,
            "MASTER_PORT": str(job.port),
            "GLOO_SOCKET_IFNAME": seat.interface,
        }
        holes = {
            "{rank}": own["RANK"],
            "{world}": own["WORLD_SIZE"],
            "{node}": seat.node,
            "{address}": seat.address,
            "{master}": own["MASTER_ADDR"],
            "{port}": own["MASTER_PORT"],
        }
        words = [_fill(word, holes) for word in job.command]
        # Unbuffered, so that lines appear when they are printed.
        yield seat, words, {**os.environ, "PYTHONUNBUFFERED": "1", **own, **job.env}


def _fill(word: str, holes: Mapping[str, str]) -> str:
    for hole, value in holes.items():
        word = word.replace(hole, value)
    return word


def _start(argv: list[str], env: Mapping[str, str], *, piped: bool) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE if piped else None
    try:
        return subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL if piped else None,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            process_group=0,  # signals are forwarded, so that each arrives once
        )
    except OSError as error:
        raise LabError(f"cannot start the command: {error.strerror}", where=" ".join(argv)) from error


def _wait(
    running: Mapping[str, subprocess.Popen[str]], received: list[int], *, keep_going: bool
) -> JobResult:
    """The first failure. Signals are forwarded; after the first one, waiting is limited."""
    first = JobResult()
    passed_on = 0
    give_up = float("inf")
    waiting = dict(running)
    while waiting and time.monotonic() < give_up:
        for node, process in list(waiting.items()):
            if process.poll() is not None:
                del waiting[node]
                if process.returncode != 0 and first.code == 0:
                    first = JobResult(_exit_code(process.returncode), node)
        if first.code and not keep_going and not received:
            break
        while passed_on < len(received):
            for process in waiting.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, received[passed_on])
            passed_on += 1
            give_up = time.monotonic() + (_GRACE_S if passed_on == 1 else 0)
        time.sleep(_LOOK_EVERY_S)
    return JobResult(128 + received[0]) if received else first


def _exit_code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned


def _read(pipe: IO[str], node: str, stream: str, on_line: OnLine, one_at_a_time: threading.Lock) -> None:
    with pipe:
        for line in pipe:
            with one_at_a_time:
                on_line(node, stream, line.rstrip("\n"))


@contextmanager
def _groups(lab: Lab, job: NodeJob) -> Iterator[dict[str, Path]]:
    """Create a CPU group for this job in each of its nodes, and remove it afterwards."""
    groups = {node: lab.groups.of(node) / f"job-{os.getpid()}" for node in job.nodes}
    try:
        for node, group in groups.items():
            try:
                group.mkdir(exist_ok=True)
            except OSError as error:
                again = f"remove the lab and build it again: echelon lab down {lab.id}"
                raise LabError(
                    f"cannot start anything in node {node}: {error.strerror}",
                    where=str(group),
                    fix="run as root" if isinstance(error, PermissionError) else again,
                ) from error
        yield groups
    finally:
        for group in groups.values():
            lab.groups.remove(group)


def _end(lab: Lab, groups: Mapping[str, Path]) -> None:
    """End all processes that the job left in its nodes."""
    stubborn = end(lambda: {pid for group in groups.values() for pid in lab.groups.pids(group)})
    send(stubborn, signal.SIGKILL)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect termination signals, in the order of arrival."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in _FORWARDED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def _foreground(pid: int) -> Iterator[None]:
    """Give the terminal, if there is one, to a process group, and take it back afterwards."""
    if not sys.stdin or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        with suppress(OSError):
            os.tcsetpgrp(terminal, pid)
            os.killpg(pid, signal.SIGCONT)  # in case it used the terminal too early
        yield
    finally:
        with suppress(OSError):
            os.tcsetpgrp(terminal, os.getpgrp())
        signal.signal(signal.SIGTTOU, before)
