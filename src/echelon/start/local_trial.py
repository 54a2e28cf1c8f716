"""How fast is each way of using this machine? Processes that train a model in turns, one way at a time.

All processes are forked at the beginning and wait; a way takes as many as it needs. While one way takes its
turn, the others wait without computing, so all see the same machine: medians over turns are compared. A
way that fails is left out, with a reason; every wait has a deadline.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from statistics import median
from types import TracebackType

from echelon.cluster.machine import usable_cores
from echelon.comm.meet import secret
from echelon.errors import LaunchError
from echelon.observe.run_folder import RunFolder
from echelon.parallel.local_way import LocalWay, cores_of
from echelon.start.command import WorkerCommand
from echelon.start.processes import WorkerProcesses
from echelon.train.local_messages import (
    BeginTrial,
    EndTrial,
    LocalJob,
    TakeTurn,
    TrialFailed,
    answer,
    send,
)

_START_S = 60.0
_BEGIN_S = 60.0
_TURN_S = 300.0


@dataclass(slots=True)
class MeasuredWay:
    """A way with its processes: seconds of a step by turn, for each batch size; or why it failed."""

    way: LocalWay
    processes: list[Connection]
    seconds: dict[int, list[float]] = field(default_factory=dict)
    failed: str = ""

    def step_s(self, batch: int) -> float:
        """The median over turns."""
        return median(self.seconds[batch])

    def rate(self, batch: int, *, measured: int = 0) -> float:
        """Samples/s with this batch; from steps of `measured` and half of it, if these were taken."""
        if batch in self.seconds:
            return batch / self.step_s(batch)
        half = measured // 2
        sample_s = (self.step_s(measured) - self.step_s(half)) / (measured - half)
        step_s = self.step_s(measured) + max(0.0, sample_s) * (batch - measured)
        return batch / step_s


class LocalTrial:
    """A pool of processes on this machine. Use it as a context manager: it leaves none behind."""

    def __init__(self, job: LocalJob, processes: int, cores: Sequence[int]) -> None:
        self.job = job
        self._cores = tuple(cores)
        self._stack = ExitStack()
        try:
            self._free = self._start(processes)
        except BaseException:
            self._stack.close()
            raise

    def _start(self, count: int) -> list[Connection]:
        root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="echelon-trial-")))
        folder = RunFolder(root).with_subfolders()
        address = str(root / "launcher")
        listener = self._stack.enter_context(Listener(address, family="AF_UNIX", backlog=count))
        # A listener without a limit would wait for ever for a process that cannot start.
        listener._listener._socket.settimeout(0.5)  # type: ignore[attr-defined]
        known = secret.for_workers(os.environ)
        commands = [self._command(number, address, known) for number in range(count)]
        processes = self._stack.enter_context(WorkerProcesses(folder, commands))
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + _START_S
        while len(found) < count:
            try:
                connection: Connection = listener.accept()
            except TimeoutError:
                self._check_alive(processes, folder, deadline, count - len(found))
                continue
            self._stack.callback(connection.close)
            found[int(connection.recv_bytes())] = connection
        self._stack.callback(self._end, list(found.values()))
        return [found[number] for number in range(count)]

    @staticmethod
    def _check_alive(processes: WorkerProcesses, folder: RunFolder, deadline: float, missing: int) -> None:
        ended = processes.exit_codes()
        if ended:
            rank = next(iter(ended))
            last = folder.log_of(rank).read_text(errors="replace").strip().splitlines()[-1:]
            raise LaunchError(
                f"process {rank} of the trial ended with exit code {ended[rank]}: {' '.join(last)}",
                where="trial on this machine",
                fix="echelon doctor looks for what is wrong with this machine",
            )
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{missing} processes of the trial have not started within {_START_S:.0f} s",
                where="trial on this machine",
                fix="try again when the machine has less load",
            )

    def _command(self, number: int, address: str, known: Mapping[str, str]) -> WorkerCommand:
        program = ["-m", "echelon.train.local_worker", address, str(number)]
        env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        return WorkerCommand(
            rank=number,
            node=socket.gethostname(),
            argv=[sys.executable, "-m", "echelon.start.worker", *program],
            env={
                **env,
                **known,
                "OMP_NUM_THREADS": str(len(self._cores)),
                "MKL_NUM_THREADS": str(len(self._cores)),
                "ECHELON_LAUNCHER": str(os.getpid()),
            },
            program=program,
        )

    @property
    def free(self) -> int:
        """How many processes no way has taken yet."""
        return len(self._free)

    def open(self, ways: Sequence[LocalWay]) -> list[MeasuredWay]:
        """Give ways their processes: these make the model, and meet, all at once."""
        opened = []
        for way in ways:
            taken, self._free = self._free[: way.processes], self._free[way.processes :]
            port = _free_port()
            for rank, process in enumerate(taken):
                cores = cores_of(way, rank, self._cores) if way.pinned else ()
                send(process, BeginTrial(job=self.job, way=way, rank=rank, port=port, cores=cores))
            opened.append(MeasuredWay(way, taken))
        for one in opened:
            self._answers(one, _BEGIN_S)
        return opened

    def turn(self, one: MeasuredWay, *, steps: int, batch: int, counts: bool = True) -> float:
        """Let a way train some steps; returns seconds of a step. It waits for the slowest process."""
        if one.failed:
            return 0.0
        for process in one.processes:
            send(process, TakeTurn(steps=steps, batch=batch))
        took_s = self._answers(one, _TURN_S) / steps
        if counts and not one.failed:
            one.seconds.setdefault(batch, []).append(took_s)
        return took_s

    def close(self, one: MeasuredWay) -> None:
        """End the processes of a way, so that their memory is free."""
        self._end(one.processes)
        one.processes = []

    def _answers(self, one: MeasuredWay, limit_s: float) -> float:
        deadline = time.monotonic() + limit_s
        slowest_s = 0.0
        for rank, process in enumerate(one.processes):
            told = answer(process, f"process {rank} of {one.way}", deadline)
            if isinstance(told, TrialFailed):
                one.failed = one.failed or told.why
            else:
                slowest_s = max(slowest_s, told.seconds)
        return slowest_s

    @staticmethod
    def _end(processes: Sequence[Connection]) -> None:
        for process in processes:
            try:
                send(process, EndTrial())
            except OSError:
                continue  # it has ended

    def __enter__(self) -> LocalTrial:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def take_turns(
    trial: LocalTrial,
    ways: Sequence[MeasuredWay],
    *,
    batch: int,
    turns: int,
    turn_s: float,
    until: float = math.inf,
    told: Callable[[float], None] = lambda part: None,
) -> None:
    """Time every way in turns of about `turn_s`, in another order each time; tells what part is done.

    When the monotonic clock shows `until`, only those that have no turn yet take one.
    """
    steps = {id(one): _steps(trial, one, batch, turn_s, until) for one in ways}
    for number in range(turns):
        told(number / turns)
        for one in ways[:: -1 if number % 2 else 1]:
            if batch not in one.seconds or time.monotonic() < until:
                trial.turn(one, steps=steps[id(one)], batch=batch)


def _steps(trial: LocalTrial, one: MeasuredWay, batch: int, turn_s: float, until: float) -> int:
    """How many steps take about so long. The first steps also make buffers, and are not counted."""
    step_s = trial.turn(one, steps=1, batch=batch, counts=False)
    if step_s > turn_s or time.monotonic() > until:
        return 1
    warm = max(2, min(20, round(turn_s / max(step_s, 1e-6))))
    step_s = trial.turn(one, steps=warm, batch=batch, counts=False)
    return max(1, round(turn_s / max(step_s, 1e-6)))


def my_cores() -> tuple[int, ...]:
    """The cores to compute with: those that this process may run on, as many as its quota grants."""
    allowed = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    count = usable_cores()
    return allowed[:count] or tuple(range(count))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
