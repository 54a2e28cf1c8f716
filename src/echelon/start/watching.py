"""Watching a run: from the start of its workers until all have ended.

Shows the leader's output and all events, injects a lab's faults, notices the first failure and requests to
stop, and lets a run with `--min-workers` go on without workers that were lost.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from echelon.config.exit_codes import SAVED_AND_STOPPED
from echelon.observe import readiness
from echelon.observe.events import (
    LAUNCHER,
    AnyEvent,
    Event,
    Noted,
    RunEnded,
    StepEnded,
    WorkerFailed,
    WorkerJoined,
)
from echelon.observe.follow import Follower
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.start.agents.invite import Joiner
from echelon.start.agents.processes import AgentProcesses
from echelon.start.agents.protocol import Begin
from echelon.start.command import WorkerCommand
from echelon.start.failure import Failure
from echelon.start.further import further_worker
from echelon.start.lab_course import LabCourse
from echelon.start.members import Members
from echelon.start.output import LeaderOutput
from echelon.start.processes import WorkerProcesses
from echelon.start.whereabouts import Whereabouts

Processes = WorkerProcesses | AgentProcesses
_LOOK_EVERY_S = 0.05
_INTERRUPT_GRACE_S = 5.0
_SAVE_GRACE_S = 25.0  # many machines are taken away 30 s after SIGTERM


class Watcher(Protocol):
    """Shows a run while it goes on."""

    def starting(self, folder: RunFolder, plan: Plan, notes: Sequence[str]) -> None:
        """Workers are about to start."""

    def joined(self, seconds: float) -> None:
        """All workers have joined, so many seconds after the start."""

    def output(self, data: bytes) -> None:
        """The leader has printed something."""

    def events(self, events: Sequence[AnyEvent]) -> None:
        """There are new events, or a moment has passed without any."""


class RunWatch:
    """Watches one run from the start of its workers until all have ended."""

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        course: LabCourse | None,
        recorder: Recorder,
        watcher: Watcher,
        stopped: list[int],
        *,
        saves: bool,
    ) -> None:
        self._folder = folder
        self._plan = plan
        self._course = course
        self._notes: list[str] = []
        self._recorder = recorder
        self._watcher = watcher
        self._stopped = stopped
        self._saves = saves
        self._follower = Follower(folder)
        self._output = LeaderOutput(folder)
        self._started_at = time.monotonic()
        self._joined: set[int] = set()
        self._joined_at: float | None = None
        self._step: int | None = None
        self._code = 0
        self.members: Members | None = None
        self.last_command: WorkerCommand | None = None
        self.joiners: Callable[[], Sequence[tuple[Joiner, Begin]]] = tuple  # machines that join now
        self._whereabouts = Whereabouts(folder, plan, recorder)

    def note(self, text: str) -> None:
        """Record a note that is shown when workers start."""
        self._notes.append(text)
        self._recorder.emit(Noted(t=time.time(), rank=LAUNCHER, text=text))

    def run(self, start: Callable[[], Processes]) -> tuple[Failure | None, int]:
        """Start the workers and watch until all have ended. Returns the first failure and the exit code."""
        self._watcher.starting(self._folder, self._plan, self._notes)
        if self._course is not None:
            self._course.begin()
        readiness.ask(self._folder)
        with start() as processes:
            if self._course is not None:
                self._course.started(processes.pids_on)
            failure = self._until_done(processes)
            if failure is not None:
                self._look()
        if self._course is not None:
            self._emit(self._course.end(completed=failure is None and not self._stopped))
        readiness.forget(self._folder)
        self._look()
        self._show(self._output.rest(failure))
        return failure, self._conclude(processes, failure)

    def _until_done(self, processes: Processes) -> Failure | None:
        interrupted_at: float | None = None
        while not processes.all_done():
            time.sleep(_LOOK_EVERY_S)
            self._look()
            if self._course is not None:
                self._emit(self._course.look(processes.exit_codes(), self._step))
            if self._stopped and interrupted_at is None:
                interrupted_at = time.monotonic()
                if self._is_to_save:
                    processes.terminate()
                else:
                    processes.interrupt()
            if interrupted_at is not None:
                if self._is_to_save and self.members is not None:
                    self._lose(self.members, processes)  # the others save without it
                if self._is_over(time.monotonic() - interrupted_at):
                    return None
                continue
            failure = self._failure(processes)
            if failure is not None:
                return failure
        return None if self._stopped else self._failure(processes)

    def _lose(self, members: Members, processes: Processes) -> None:
        """Tell the service who has ended, and the user who was lost."""
        members.look()
        for rank in members.to_end():
            processes.kill(rank)
        codes = processes.exit_codes()
        for rank, code in codes.items():
            members.ended(rank, code, processes.machine_gone(rank))
        for rank in members.to_start() if not self._stopped else ():
            processes.restart(rank)
        for rank in members.to_add() if not self._stopped else ():
            assert self.last_command is not None
            assert isinstance(processes, WorkerProcesses)
            processes.add(further_worker(self.last_command, rank))
        for joiner, begin in self.joiners() if not self._stopped else ():
            assert isinstance(processes, AgentProcesses)
            processes.attach(joiner.agent, begin)
        processes.lost, processes.excused = members.gone, members.excused
        processes.judged = codes.keys()  # who ends from here on is looked at next time
        self._emit(members.happened())
        for text in members.news():
            self._emit([Noted(t=time.time(), rank=LAUNCHER, text=text, warning=True)])
            self._output.follow(members.leader)

    def _failure(self, processes: Processes) -> Failure | None:
        if self.members is not None:
            self._lose(self.members, processes)
        failure = processes.failure()
        if failure is None and (self.members is None or not self.members.awaits):
            absent = self.members.absent if self.members is not None else frozenset[int]()
            failure = self._whereabouts.look(processes, absent)
        if failure is not None:
            # Before the others are ended: a worker that ended well, or has not ended, failed all the same.
            self._code = processes.exit_codes().get(failure.rank) or 1
        return failure

    @property
    def _is_to_save(self) -> bool:
        """Whether the workers save before they stop: after SIGTERM, by which machines are taken away."""
        return self._saves and self._stopped[:1] == [signal.SIGTERM]

    def _is_over(self, waited_s: float) -> bool:
        """Whether workers that were asked to stop are ended now. Some send SIGTERM more than once."""
        if self._is_to_save:
            return signal.SIGINT in self._stopped or waited_s > _SAVE_GRACE_S
        return len(self._stopped) > 1 or waited_s > _INTERRUPT_GRACE_S

    def _look(self) -> None:
        """Show new output and events."""
        output = self._output.read()  # before the events, so that what they tell comes first
        events = self._follower.poll()
        for event in events:
            self._whereabouts.take(event)
            if isinstance(event, WorkerJoined):
                self._joined.add(event.rank)
            elif isinstance(event, StepEnded) and event.rank == 0:
                self._step = event.step
        if self._joined_at is None and len(self._joined) == len(self._plan.workers):
            self._joined_at = time.monotonic()
            self._watcher.joined(self._joined_at - self._started_at)
        self._show(output)
        self._watcher.events(events)

    def _show(self, data: bytes) -> None:
        if data:
            self._watcher.output(data)

    def _emit(self, events: Sequence[Event]) -> None:
        for event in events:
            self._recorder.emit(event)
        if events:
            self._recorder.flush()

    def _conclude(self, processes: Processes, failure: Failure | None) -> int:
        """Record how the run ended. Returns the exit code."""
        if self._saves and SAVED_AND_STOPPED in processes.exit_codes().values() and failure is None:
            outcome, detail = "interrupted", "SIGTERM, after a last checkpoint"
            code = SAVED_AND_STOPPED
        elif self._stopped:
            outcome, detail, code = (
                "interrupted",
                signal.Signals(self._stopped[0]).name,
                128 + self._stopped[0],
            )
        elif failure is not None:
            outcome, detail = (
                "failed",
                failure.cause if failure.unclear else f"rank {failure.rank}: {failure.cause}",
            )
            code = self._code if self._code > 0 else 128 - self._code
            self._recorder.emit(
                WorkerFailed(
                    t=failure.t,
                    rank=LAUNCHER,
                    failed=failure.rank,
                    node=processes.node_of(failure.rank),
                    cause=failure.cause,
                )
            )
        else:
            outcome, detail, code = "completed", "", 0
        self._recorder.emit(RunEnded(t=time.time(), rank=LAUNCHER, outcome=outcome, detail=detail))
        self._recorder.flush()
        self._watcher.events(self._follower.poll())
        return code


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect signals that ask to stop, so that the launcher can clean up first."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread may handle signals
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    caught = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.signal(number, note) for number in caught}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
