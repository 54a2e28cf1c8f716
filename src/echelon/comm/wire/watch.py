"""Watches the waits of this worker that last long: what are the others doing, and can this end?

A thread that has been blocked for a second reports what it is blocked on. From then on the loop's thread
asks the other workers, now and then, what they are doing (`doing.py`). If the answers make it certain that
workers make different calls (`mismatch.py`), twice and about the same waits, all workers raise an error
that says who is doing what. Otherwise a callback is told whom this worker waits for.

If a worker's loop was left by an exception, an engine may have caught it, and nothing more will come; or
the script goes on in another way. The worker has failed if it has been idle for a few seconds since then,
outside of any call, while others, whose loops were not left like that, are blocked without it. Then they
raise an error with its exception.

`report` runs in threads that wait, everything else in the loop's thread.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from echelon.comm.inbox import Inbox
from echelon.comm.wire import blame, doing
from echelon.comm.wire.doing import Doing
from echelon.comm.wire.frames import CHANNEL_BITS
from echelon.comm.wire.mismatch import Facts, Stage, different_calls, is_certain
from echelon.comm.wire.notices import Blocked, DoingAnswer, DoingQuestion
from echelon.errors import MismatchedCalls, WorkerError

if TYPE_CHECKING:
    from echelon.comm.wire.loop import Loop

TCP_PAIR_CHANNELS = 1 << 20  # the channels of messages from one worker to another, beyond those of groups
MEMORY_CHANNELS = 1 << 21  # those of reductions in shared memory
SLOT_CHANNELS = 3 << 20  # those of operations through slots in shared memory
PAIR_CHANNELS = 1 << 22  # those of messages from one worker to another in shared memory
_ASK_AGAIN_S = (0.6, 2.0)  # after the first question, after later ones
_CONFIRM_S = 0.5
_CONFIRM_CODED_S = 5.0  # a codec thread may compute for a while before it begins an operation
_SILENT_S = 1.5
_TICK_S = 0.1
_REPORT_S = 2.0
_LOOK_S = 0.2
_LEFT_S = 2.5  # a script that goes on after an exception makes its next call before, or computes
_IDLE = 0.2  # of the time
_IDLE_LOOK_S = 0.5
_CODECS = ("echelon-codec",)  # the only threads of Echelon's own that begin operations
_WAITS_FOR_WORK = Inbox.get.__code__

_log = logging.getLogger(__name__)
OnWaiting = Callable[[list[int], float, str], None]  # awaited ranks, since when (Unix time), what they do


class Awaited(Protocol):
    """What a thread is blocked on. `thread` has begun it."""

    tag: int
    thread: int

    @property
    def ended(self) -> bool:
        """Whether it is over."""

    def awaited(self) -> set[int]:
        """The peers without which it cannot go on now."""

    def requires(self, rank: int) -> bool:
        """Whether it cannot end before that worker has begun it."""

    def lacks(self, rank: int) -> bool:
        """Whether it lacks a message that the peer has sent if the operation is over there."""


@dataclass(slots=True)
class _Wait:
    """A wait of one thread. `endless`: only the operation, or its deadline, ends it."""

    what: Awaited
    number: int
    since: float  # Unix time
    endless: bool
    ask_at: float
    report_at: float
    questions: set[int] = field(default_factory=set)
    unanswered: dict[int, float] = field(default_factory=dict)  # since when, by rank
    answers: dict[int, DoingAnswer] = field(default_factory=dict)
    suspected: dict[int, tuple[object, float]] = field(default_factory=dict)  # evidence, since when


@dataclass(slots=True)
class _Inquiry:
    """This worker got a message of another call, and asks what the others are doing before it says so."""

    number: int
    found: str
    unanswered: set[int]
    until: float
    doings: dict[int, Doing]


@dataclass(slots=True)
class _LeftLoop:
    """The script's loop in this thread was left by an exception, and it has begun no operation since."""

    cause: str
    thread: int
    system_thread: int
    looked_at: float
    active_s: float  # when looked at
    idle_since: float


class Watch:
    """The long waits of one worker.

    workers     the ranks that train; the others are servers, which nobody asks
    on_waiting  called while a wait goes on
    memory      for the channels of reductions in shared memory: whether this worker has begun a number
    slots       the same for operations through slots
    """

    def __init__(self, loop: Loop, ranks: Collection[int]) -> None:
        self.workers = frozenset(loop.names)
        self.on_waiting: OnWaiting | None = None
        self.memory: dict[int, Callable[[int], bool]] = {}
        self.slots: dict[int, Callable[[int], bool]] = {}
        self.beginner = 0  # the thread that began the last operation
        self._beginners: set[int] = set()
        self._maker = threading.get_ident()
        self._loop = loop
        self._mine = frozenset(ranks)
        self._waits: dict[int, _Wait] = {}  # by thread
        self._numbers = 0
        self._questions = 0
        self._tick_at = 0.0
        self._inquiry: _Inquiry | None = None
        self._looked = (0.0, Doing())
        self._left: _LeftLoop | None = None
        self._times_left = 0

    # In threads that wait ------------------------------------------------------------------------

    def report(self, what: Awaited, waited_s: float, *, endless: bool = True) -> Callable[[], None] | None:
        """This thread is blocked on `what`, since `waited_s`; returns what ends the report."""
        if not self._mine <= self.workers:
            return None
        thread = threading.get_ident()
        known = self._waits.get(thread)
        if known is None or known.what is not what:
            now = time.monotonic()
            self._numbers += 1
            since, report_at = time.time() - waited_s, now - waited_s + _REPORT_S
            self._waits[thread] = _Wait(what, self._numbers, since, endless, now, report_at)
            self._loop.wake()
        return lambda: self._end(thread)

    def _end(self, thread: int) -> None:
        self._waits.pop(thread, None)

    def left_loop(self, error: BaseException | None) -> None:
        """The loop of this thread was left by an error; None: it goes on."""
        before, self._left = self._left, None
        if error is not None:
            cause = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            site, now, thread = doing.site_of(error), time.monotonic(), threading.get_native_id()
            cause = f"{cause} ({site})" if site else cause
            self._left = _LeftLoop(cause, threading.get_ident(), thread, now, _active_s(thread), now)
            if before is None or before.cause != cause:  # else it leaves an outer loop, too
                self._times_left += 1

    def about(self, ranks: Sequence[int]) -> str:
        """What these workers do, as far as they have answered: `rank 1 is computing (train.py:77)`."""
        wait = self._waits.get(threading.get_ident()) or self._trainers_wait()
        if wait is None:
            return ""
        doings = {rank: answer.doing for rank, answer in list(wait.answers.items())}
        return doing.awaited(ranks, doings, self._silent(wait))

    # In the loop's thread ------------------------------------------------------------------------

    def begins(self, thread: int) -> None:
        """A thread begins an operation that has not begun the one before it."""
        self.beginner = thread
        self._beginners.add(thread)

    def goes_on(self, thread: int) -> None:
        """A thread begins an operation: if its loop was left, the script goes on."""
        if self._left is not None and self._left.thread == thread:
            self._left = None

    def tick(self) -> MismatchedCalls | None:
        """Ask, and report, if it is time to; returns the error if workers make different calls."""
        if self._inquiry is not None:
            return self._outcome(self._inquiry)
        if not self._waits or (now := time.monotonic()) < self._tick_at:
            return None
        self._tick_at = now + _TICK_S
        own = _own_threads()
        for thread, wait in list(self._waits.items()):
            if wait.what.ended or thread in own:
                continue
            if now >= wait.ask_at:
                self._ask(wait, now)
            if now >= wait.report_at:
                wait.report_at = now + _REPORT_S
                self._report_to_script(wait)
        return None

    def _ask(self, wait: _Wait, now: float) -> None:
        self._questions += 1
        wait.ask_at = now + _ASK_AGAIN_S[min(len(wait.questions), 1)]
        wait.questions.add(self._questions)
        trained = wait.what.thread not in _own_threads()
        question = DoingQuestion(self._questions, wait.what.tag, trained)
        for rank in self._tell_workers(question):
            wait.unanswered.setdefault(rank, now)

    def _tell_workers(self, question: DoingQuestion) -> set[int]:
        """Ask all workers that are there; returns their ranks."""
        asked = set(self.workers & self._loop.live.keys())
        for rank in asked:
            self._loop.live[rank].tell(question)
        return asked

    def inquire(self, found: str) -> None:
        """A peer sent a message of another call, as `found` says: ask all workers what they are doing."""
        if self._inquiry is None:
            self._questions += 1
            asked = self._tell_workers(DoingQuestion(self._questions, 0))
            doings = dict.fromkeys(self._mine & self.workers, self.doing(now=True))
            self._inquiry = _Inquiry(self._questions, found, asked, time.monotonic() + _SILENT_S, doings)

    def _outcome(self, inquiry: _Inquiry) -> MismatchedCalls | None:
        """The error, once all have answered or had the time to."""
        if inquiry.unanswered & self._loop.live.keys() and time.monotonic() < inquiry.until:
            return None
        return different_calls(self._loop.names, inquiry.doings, inquiry.found)

    def answer(self, rank: int, question: DoingQuestion) -> DoingAnswer:
        """What this worker is doing, for the peer that asks."""
        wait = self._trainers_wait()
        blocked = None
        if wait is not None and wait.endless:
            what = wait.what
            blocked = Blocked(what.tag, wait.number, what.requires(rank), what.thread not in _own_threads())
        return DoingAnswer(
            question.number,
            self.doing(),
            self._stage(question.operation),
            self._may_begin(trained=question.trained),
            blocked,
            self._failed(),
            self._times_left,
        )

    def _failed(self) -> str:
        """The exception that has ended this worker's loop, if it has been idle for a while."""
        left, now = self._left, time.monotonic()
        if left is None:
            return ""
        passed_s = now - left.looked_at
        if passed_s > _IDLE_LOOK_S:
            active_s = _active_s(left.system_thread)
            busy = active_s - left.active_s > _IDLE * passed_s
            if busy or doing.is_in_a_call(doing.stack_of(left.thread)):
                left.idle_since = now
            left.looked_at, left.active_s = now, active_s
        return left.cause if now - left.idle_since > _LEFT_S else ""

    def hear(self, rank: int, answer: DoingAnswer) -> WorkerError | None:
        """Note an answer; returns the error if it makes certain that this wait cannot end."""
        if self._inquiry is not None and answer.number == self._inquiry.number:
            self._inquiry.unanswered.discard(rank)
            self._inquiry.doings[rank] = answer.doing
            return self._outcome(self._inquiry)
        wait = next((one for one in list(self._waits.values()) if answer.number in one.questions), None)
        if wait is None:
            return None
        wait.unanswered.pop(rank, None)
        wait.answers[rank] = answer
        blocked = wait.endless and wait is self._trainers_wait()
        failed = answer.failed and answer.times_left > self._times_left
        if blocked and failed and answer.stage == Stage.NOT_BEGUN:
            return blame.failed(self._loop.names, rank, answer.failed, self._loop.me)
        if not blocked or not is_certain(self._facts(wait, rank, answer)):
            wait.suspected.pop(rank, None)
            return None
        evidence = (answer.blocked, answer.stage)
        now = time.monotonic()
        before, since = wait.suspected.setdefault(rank, (evidence, now))
        if before != evidence:
            wait.suspected[rank] = (evidence, now)
            return None
        trained = wait.what.thread not in _own_threads()
        coded = not trained or (answer.blocked is not None and not answer.blocked.trained)
        if now - since < (_CONFIRM_CODED_S if coded else _CONFIRM_S):
            return None
        return self._error(wait, rank)

    def _facts(self, wait: _Wait, rank: int, answer: DoingAnswer) -> Facts:
        theirs = answer.blocked
        return Facts(
            stage=answer.stage,
            required=wait.what.requires(rank),
            lacking=wait.what.lacks(rank),
            may_begin=answer.may_begin,
            blocked=theirs is not None and theirs.operation != wait.what.tag,
            requires_me=theirs is not None and theirs.requires_you,
            begun_here=theirs is not None and self._stage(theirs.operation) != Stage.NOT_BEGUN,
            may_begin_here=theirs is not None and self._may_begin(trained=theirs.trained),
        )

    def _error(self, wait: _Wait, suspect: int) -> MismatchedCalls:
        """Names the workers that are blocked; others may still compute."""
        doings = {
            rank: answer.doing
            for rank, answer in wait.answers.items()
            if answer.blocked is not None or rank == suspect
        }
        return different_calls(self._loop.names, {**doings, **dict.fromkeys(self._mine, self.doing())})

    def _report_to_script(self, wait: _Wait) -> None:
        """Report whom a wait waits for: those that have not begun, or do not answer.

        If there are none, all have arrived, and bytes are moving.
        """
        silent = self._silent(wait)
        behind = {rank for rank, answer in wait.answers.items() if answer.stage == Stage.NOT_BEGUN}
        ranks = sorted(behind | silent)
        told = self.on_waiting
        if ranks and told is not None:
            doings = {rank: answer.doing for rank, answer in wait.answers.items()}
            try:
                told(ranks, wait.since, doing.awaited(ranks, doings, silent))
            except Exception:  # noqa: BLE001 - the loop must go on
                _log.exception("a wait could not be reported")

    def _silent(self, wait: _Wait) -> set[int]:
        now = time.monotonic()
        return {rank for rank, since in list(wait.unanswered.items()) if now - since > _SILENT_S}

    # This worker ---------------------------------------------------------------------------------

    def doing(self, *, now: bool = False) -> Doing:
        """What this worker's training thread is doing; `now`: not a moment ago."""
        looked_at, found = self._looked
        if now or time.monotonic() - looked_at > _LOOK_S:
            found = doing.describe(doing.stack_of(self._trainer()))
            left = self._left
            if left is not None and found.call == doing.COMPUTING:
                found = Doing(f"outside of its loop, which {left.cause} has ended", found.site)
            self._looked = (time.monotonic(), found)
        return found

    def _trainer(self) -> int:
        """The training thread: one that waits; else the last that began an operation."""
        own = _own_threads() | {0}
        known = [*self._waits, self.beginner, *self._beginners]
        return next((thread for thread in known if thread not in own), self._maker)

    def _trainers_wait(self) -> _Wait | None:
        """The wait of the training thread, if it is blocked; None if several threads are."""
        own = _own_threads()
        waits = list(self._waits.items())
        found = [wait for thread, wait in waits if not wait.what.ended and thread not in own]
        return found[0] if len(found) == 1 else None

    def _stage(self, tag: int) -> Stage:
        channel, number = tag >> CHANNEL_BITS, tag & ((1 << CHANNEL_BITS) - 1)
        if channel < MEMORY_CHANNELS:
            return self._loop.stage(tag)
        if channel >= PAIR_CHANNELS:  # only the sender begins a message, and then it is there
            return Stage.NOT_BEGUN
        of_slots = channel >= SLOT_CHANNELS
        known, first = (self.slots, SLOT_CHANNELS) if of_slots else (self.memory, MEMORY_CHANNELS)
        begun = known.get(channel - first)
        return Stage.BEGUN if begun is not None and begun(number) else Stage.NOT_BEGUN

    def _may_begin(self, *, trained: bool) -> bool:
        """Whether a thread that is not blocked might begin an operation.

        `trained`: one that training threads begin, which codec threads do not. A codec thread may begin
        another one if it is at work, or if it waits for an operation in flight.
        """
        running, own = sys._current_frames(), _own_threads()
        others = (self._beginners & running.keys()) - own - {self._trainer()}
        if trained or others:
            return bool(others)
        codecs = _own_threads(_CODECS) & running.keys()
        at_work = {thread for thread in codecs if running[thread].f_code is not _WAITS_FOR_WORK}
        return bool(at_work or codecs & self._loop.threads_in_flight())


def _active_s(system_thread: int) -> float:
    """The seconds that a thread of this process was on a core, or ready to run without one."""
    try:
        on_core, without, _ = Path(f"/proc/self/task/{system_thread}/schedstat").read_text().split()
        return (int(on_core) + int(without)) * 1e-9
    except (OSError, ValueError):
        return 0.0  # it has ended, or the system keeps no record


def _own_threads(names: tuple[str, ...] = ("echelon-",)) -> set[int]:
    """Echelon's own threads, which are not the script's; or those whose names begin like these."""
    return {thread.ident or 0 for thread in threading.enumerate() if thread.name.startswith(names)}
