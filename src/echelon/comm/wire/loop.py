"""The thread that serves all connections of a worker, and the operations that it carries out.

One thread serves all peers, so that no peer blocks another and no two of our threads compete for the
interpreter lock. It sleeps in the kernel until a socket is ready or an operation is submitted.

A peer that dies or fails ends every operation at once, on every worker, because each is connected with it.
A peer that leaves without an error ends only the operations that still need it. An operation that one
worker gives up is given up by all; that worker tells them the reason. If workers make different calls
(`watch.py`), all operations of all workers end. At a deadline workers ask each other whether they have
begun the operation (`liveness.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import select
import socket
import struct
import sys
import termios
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from echelon.comm.future import Future, Timing
from echelon.comm.wire import blame
from echelon.comm.wire.connection import Connection
from echelon.comm.wire.frames import CHANNEL_BITS as CHANNEL_BITS
from echelon.comm.wire.liveness import LivenessCheck
from echelon.comm.wire.mismatch import Stage
from echelon.comm.wire.notices import (
    Answer,
    DifferentCalls,
    DoingAnswer,
    DoingQuestion,
    GaveUp,
    LeaveNotice,
    Notice,
    Question,
    shortened,
)
from echelon.comm.wire.watch import TCP_PAIR_CHANNELS, Watch
from echelon.errors import Corrupt, MismatchedCalls, PeerLost, RoundTimeout, StaleView, WorkerError

_MARGIN_S = 8.0
_TICK_S = 0.1
_SWITCH_S = 5e-4
_LINGER_S = 1.0
_LINGER_POLL_S = 0.001
_ROUNDS = 4
_SEE_LOG = "see the log of the worker it names"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Operation(ABC, Generic[T]):
    """One worker's part of an operation, with the result that its future gets. `thread` has begun it.

    `begin`, `needs`, `awaited` and `end` run in the loop's thread.
    """

    def __init__(self, tag: int, deadline_s: float, result: T) -> None:
        self.tag = tag
        self.thread = threading.get_ident()
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.timing = Timing()
        self.future: Future[T] = Future(self, self.timing)
        self.loop: Loop | None = None  # set when it is submitted
        self._result = result

    @abstractmethod
    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Queue the first messages."""

    @abstractmethod
    def needs(self, rank: int) -> bool:
        """Whether that peer has still to receive something, or to send something that has not arrived."""

    @abstractmethod
    def awaited(self) -> set[int]:
        """The peers without which it cannot go on now."""

    def requires(self, rank: int) -> bool:
        """Whether it cannot end before that worker has begun it, as far as is known."""
        return rank in self.awaited()

    def lacks(self, rank: int) -> bool:
        """Whether it lacks a message that the peer has sent if the operation is over there."""
        return False

    def end(self, error: BaseException | None = None) -> None:
        """Complete the future; the first call counts."""
        if not self.future.done():
            self.timing.ended = self.timing.ended or time.perf_counter()
            self.future.complete(self._result, error)

    @property
    def ended(self) -> bool:
        """Whether it is over, by success or failure."""
        return self.future.done()

    @property
    def error(self) -> BaseException | None:
        """The error that ended it, if any."""
        return self.future.error

    # For threads that wait for it ----------------------------------------------------------------

    def progress(self) -> bool:
        """As the group of this loop does."""
        return self.loop is not None and self.loop.progress()

    def limit_s(self) -> float:
        """The loop ends it soon after the deadline; the margin is for a loop that is itself delayed."""
        return max(0.0, self.deadline - time.monotonic()) + _MARGIN_S

    def overdue(self, timeout_s: float | None) -> Exception:
        """Names the awaited workers; or the loop, if that has not ended the operation at its deadline."""
        if timeout_s is None or self.loop is None:
            return WorkerError("the thread that moves bytes is stuck", fix="report this as a defect")
        ranks = sorted(self.awaited())
        return blame.late(self.loop.names, ranks, timeout_s, self.loop.me, self.loop.watch.about(ranks))

    def stalled(self, waited_s: float, *, endless: bool) -> Callable[[], None] | None:
        """Report it to the loop's watch."""
        return None if self.loop is None else self.loop.watch.report(self, waited_s, endless=endless)


class Loop:
    """Owns the connections. `names`: how errors call workers, by rank; `me`: how they call this one."""

    def __init__(
        self, connections: Mapping[int, Connection], names: Mapping[int, str], *, me: str = ""
    ) -> None:
        self.connections = dict(connections)
        self.names = names
        self.me = me
        self.progress: Callable[[], bool] = _nothing  # what a thread does before it blocks
        self.tick: Callable[[], None] = _idle  # what the loop's thread does now and then
        self._mine = set(names) - set(connections)
        self.live = dict(connections)  # the peers that are not gone
        self.watch = Watch(self, self._mine)
        self._broken: dict[int, Exception] = {}
        self._departures: dict[int, LeaveNotice] = {}
        self._lost: dict[int, WorkerError] = {}
        self._early_ends: list[WorkerError] = []  # of peers that left without an error
        self._dead: WorkerError | None = None  # a peer died or failed: no operation can work
        self._loss: WorkerError | None = None
        self._reasons: list[WorkerError] = []
        self._operations: dict[int, Operation[Any]] = {}
        self._begun: dict[int, int] = {}
        self._given_up: dict[int, WorkerError] = {}
        self._late: dict[int, LivenessCheck] = {}
        self._door = threading.Lock()
        self._inbox: deque[Operation[Any]] = deque()
        self._over: WorkerError | None = None
        self._closing = False
        self._cause = ""
        self._found = ""  # how this worker noticed that workers make different calls
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._wake_in.fileno(), select.EPOLLIN)
        self._by_fd: dict[int, int] = {}
        for rank, connection in self.connections.items():
            self._by_fd[connection.sock.fileno()] = rank
            self._poll.register(connection.sock.fileno(), select.EPOLLIN)
        # Other threads must release the interpreter lock often enough (benchmarks/lock.py).
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._switch_s, _SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="echelon-wire", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation[Any]) -> None:
        """Start an operation. Its deadline runs from now on."""
        operation.deadline = time.monotonic() + operation.deadline_s
        operation.loop = self
        with self._door:
            if self._over is None:
                self._inbox.append(operation)
        if self._over is not None:
            operation.end(self._over)
        self.wake()

    def check(self, ranks: Collection[int] | None = None) -> None:
        """Raise if a peer has died or failed, or the loop itself; or if one of these has left.

        Without ranks: if any has left.
        """
        error = self._dead or self._over
        if error is None and ranks is None:
            error = self._loss
        elif error is None and self._lost:
            error = next((self._lost[rank] for rank in ranks or () if rank in self._lost), None)
        if error is not None:
            raise self._explained(error)

    def differ(self, found: str) -> None:
        """Workers take part in different operations, as `found` says: all operations of all workers end.

        Returns when this worker knows the error, which `check` raises.
        """
        self._found = found
        self.wake()
        until = time.monotonic() + _MARGIN_S
        while self._dead is None and self._over is None and time.monotonic() < until:
            time.sleep(_LINGER_POLL_S)

    def note(self, error: WorkerError) -> None:
        """Note an error found elsewhere: if this worker leaves because of it, peers learn whom to blame."""
        self._reasons.append(error)

    def close(self, cause: str = "") -> None:
        """End all operations at once, with an error. What the kernel holds is still delivered."""
        if not self._closing:
            self._cause = cause
            self._closing = True
            sys.setswitchinterval(self._switch_s)
            self.wake()
        self._thread.join(timeout=5.0)

    def wake(self) -> None:
        """Wake the loop's thread."""
        with contextlib.suppress(OSError):  # closed, or full: it wakes anyway
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        over: WorkerError = PeerLost("this worker has left the group", where=self.me)
        try:
            while not self._closing:
                events = self._poll.poll(_TICK_S)
                for fd, event in events or self._overdue():
                    self._serve(fd, event)
                self._settle()
                while self._inbox:
                    self._begin(self._inbox.popleft())
                self.tick()
                self._flush()
                self._check_deadlines()
                if self._found:
                    self.watch.inquire(self._found)
                    self._found = ""
                self._disagree(self.watch.tick())
        except Exception as error:  # noqa: BLE001 - waiting threads must learn of any error
            _log.exception("the thread that moves bytes failed")
            self._cause = self._cause or f"{type(error).__name__}: {error}"
            over = _defect(error, self.me)
        finally:
            self._shut(over)

    # Bytes ---------------------------------------------------------------------------------------

    def _overdue(self) -> list[tuple[int, int]]:
        """After a timeout: connections for which the kernel may have less of a frame than was asked for."""
        return [
            (connection.sock.fileno(), select.EPOLLIN)
            for connection in self.live.values()
            if connection.in_a_frame and not connection.paused
        ]

    def _serve(self, fd: int, event: int) -> None:
        if fd == self._wake_in.fileno():
            self._wake_in.recv(4096)
            return
        rank = self._by_fd.get(fd)
        if rank is None:
            return
        connection = self.connections[rank]
        try:
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                connection.read()
            if event & (select.EPOLLHUP | select.EPOLLERR) and connection.paused:
                raise ConnectionResetError("the peer is gone")
        except (OSError, Corrupt, StaleView) as error:
            self._broken[rank] = error
        self._hear_all(rank, connection)

    def _flush(self) -> None:
        """Write what can be written, and ask to be woken for the rest."""
        for _ in range(_ROUNDS):  # a step that is sent lets the next step send
            again = False
            for rank, connection in list(self.live.items()):
                if connection.wants_to_write:
                    self._write(rank, connection)
                    again = again or connection.progressed
            self._settle()
            if not again:
                break
        for connection in self.live.values():
            self._interest(connection)
        for tag in [tag for tag, operation in self._operations.items() if operation.ended]:
            del self._operations[tag]
            self._late.pop(tag, None)

    def _write(self, rank: int, connection: Connection) -> None:
        try:
            connection.write()
        except OSError as error:
            connection.progressed = False
            self._broken[rank] = error
            with contextlib.suppress(OSError, WorkerError):  # it may have sent the reason
                while not connection.paused:
                    before = connection.received_bytes
                    connection.read()
                    if connection.received_bytes == before:
                        break
            self._hear_all(rank, connection)

    def _interest(self, connection: Connection) -> None:
        writing = select.EPOLLOUT if connection.wants_to_write else 0
        wanted = (0 if connection.paused else select.EPOLLIN) | writing
        if wanted != connection.interest:
            connection.interest = wanted
            self._poll.modify(connection.sock.fileno(), wanted)

    # Operations ----------------------------------------------------------------------------------

    def _begin(self, operation: Operation[Any]) -> None:
        if operation.thread != self.watch.beginner:
            self.watch.begins(operation.thread)
        self.watch.goes_on(operation.thread)
        channel = operation.tag >> CHANNEL_BITS
        self._begun[channel] = max(self._begun.get(channel, 0), operation.tag)
        given_up = self._given_up.pop(operation.tag, None)
        error = given_up or self._dead
        if error is not None:
            self._end(operation, error, tell=given_up is None)
            return
        self._operations[operation.tag] = operation
        operation.begin(self.connections)
        self._settle()
        # Only now: a peer that has left may have sent all that is needed before.
        if self._lost and not operation.ended:
            gone = [rank for rank in self._lost if operation.needs(rank)]
            if gone:
                self._end(operation, self._explained(self._lost[gone[0]]))

    def _has_begun(self, tag: int) -> bool:
        if tag >> CHANNEL_BITS >= TCP_PAIR_CHANNELS:  # messages between two workers have no common order
            return tag in self._operations
        return tag <= self._begun.get(tag >> CHANNEL_BITS, 0)

    def stage(self, tag: int) -> Stage:
        """How far this worker is with an operation. One that has failed is not said to be over."""
        if not self._has_begun(tag):
            return Stage.NOT_BEGUN
        return Stage.BEGUN if tag in self._operations or self._reasons else Stage.OVER

    def threads_in_flight(self) -> set[int]:
        """The threads that have begun the operations in flight."""
        return {operation.thread for operation in self._operations.values()}

    def _end(self, operation: Operation[Any], error: WorkerError, *, tell: bool = True) -> None:
        for connection in self.connections.values():
            connection.forget(operation.tag)
        self._operations.pop(operation.tag, None)
        self._late.pop(operation.tag, None)
        self._reasons.append(error)
        operation.end(error)
        if tell and not isinstance(error, MismatchedCalls):  # of that, all have heard
            text = shortened(error.message)
            self._tell(GaveUp(operation.tag, error.ranks, text, isinstance(error, RoundTimeout)))

    def _tell(self, notice: Notice) -> None:
        for connection in self.live.values():
            connection.tell(notice)

    # Losses --------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Handle broken connections; deaths first, because others leave because of them."""
        for rank, connection in self.live.items():
            if isinstance(connection.broken, MismatchedCalls):
                self.watch.inquire(connection.broken.message)
                connection.broken = None
            elif connection.broken is not None:
                self._broken.setdefault(rank, connection.broken)
        while self._broken:
            rank = min(self._broken, key=lambda rank: (rank in self._departures, rank))
            self._lose(rank, self._broken.pop(rank))

    def _lose(self, rank: int, cause: Exception) -> None:
        """A peer is gone: end the operations that need it; all of them, unless it left without an error."""
        connection = self.live.pop(rank, None)
        if connection is None:
            return
        departure = self._departures.get(rank)
        if isinstance(cause, WorkerError):
            cause.ranks = (rank,)
            error = cause
            _log.warning("%s", cause.message)
        elif departure is None:
            error = blame.died(self.names, (rank,), f"{self.me} ({cause})" if self.me else str(cause))
        else:
            error = self._left(rank, departure)
        self._lost[rank] = error
        if departure is not None and not departure.cause and error is not cause:
            self._early_ends.append(error)
        if departure is None or departure.cause or error is cause:
            self._dead = self._dead or error
        self._loss = self._dead or self._loss or error
        self._reasons.append(error)
        for operation in list(self._operations.values()):
            if not operation.ended and (self._dead or operation.needs(rank)):
                self._end(operation, self._dead or self._explained(error))
        if error is cause:  # the peer lives, and should learn why it is disconnected
            connection.tell(LeaveNotice(shortened(error.message), (rank,)))
            with contextlib.suppress(OSError):
                connection.write()
        self._poll.unregister(connection.sock.fileno())
        self._by_fd.pop(connection.sock.fileno(), None)
        connection.sock.close()

    def _left(self, rank: int, departure: LeaveNotice) -> WorkerError:
        if departure.blamed and not self._mine & set(departure.blamed):
            return PeerLost(departure.cause, ranks=departure.blamed, where=self.me, fix=_SEE_LOG)
        if departure.cause:
            return blame.failed(self.names, rank, departure.cause, self.me)
        return blame.ended(self.names, (rank,), self.me)

    def _explained(self, error: WorkerError) -> WorkerError:
        """An error about a peer that left without an error, with what this worker needed it for."""
        if not any(error is one for one in self._early_ends):
            return error
        doing = dict.fromkeys(self._mine, self.watch.doing(now=True))
        return blame.ended(self.names, error.ranks, self.me, doing)

    # Notices -------------------------------------------------------------------------------------

    def _hear_all(self, rank: int, connection: Connection) -> None:
        notices, connection.notices = connection.notices, []
        for notice in notices:
            self._hear(rank, notice)

    def _hear(self, rank: int, notice: Notice) -> None:
        match notice:
            case LeaveNotice():
                self._departures[rank] = notice
            case GaveUp():
                self._hear_given_up(rank, notice)
            case Question():
                begun = self._has_begun(notice.operation)
                if rank in self.live:
                    self.live[rank].tell(Answer(notice.operation, begun, self.watch.doing()))
                self._ask_all(notice.operation)
            case Answer():
                if notice.operation in self._late:
                    self._late[notice.operation].hear(rank, notice.begun, notice.doing)
            case DoingQuestion():
                if rank in self.live:
                    self.live[rank].tell(self.watch.answer(rank, notice))
            case DoingAnswer():
                self._disagree(self.watch.hear(rank, notice))
            case DifferentCalls():
                heard = MismatchedCalls(notice.text, ranks=notice.ranks, where=notice.where, fix=notice.fix)
                self._disagree(heard, tell=False)

    def _hear_given_up(self, rank: int, notice: GaveUp) -> None:
        error: WorkerError
        if self._mine & set(notice.blamed):
            text = f"{self.names[rank]} gave up on this worker: {notice.text}"
            error = PeerLost(text, ranks=(rank,), where=self.me, fix=_SEE_LOG)
        else:
            kind = RoundTimeout if notice.late else PeerLost
            error = kind(notice.text, ranks=notice.blamed, where=self.me, fix=_SEE_LOG)
        operation = self._operations.get(notice.operation)
        if operation is not None and not operation.ended:
            self._end(operation, error, tell=False)
        elif not self._has_begun(notice.operation):
            self._given_up[notice.operation] = error

    def _disagree(self, error: WorkerError | None, *, tell: bool = True) -> None:
        """If workers make different calls, or one has failed, no operation can end any more, on any."""
        if error is None or self._dead is not None:
            return
        self._dead = self._loss = error
        self._reasons.append(error)
        for operation in list(self._operations.values()):
            self._end(operation, error)
        if tell and isinstance(error, MismatchedCalls):
            self._tell(DifferentCalls(error.ranks, shortened(error.message), error.where, error.fix))

    # Deadlines -----------------------------------------------------------------------------------

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for operation in list(self._operations.values()):
            if now > operation.deadline:
                self._ask_all(operation.tag)
        for tag, check in list(self._late.items()):
            if check.is_over(now):
                operation = self._operations[tag]
                blamed = check.missing() or sorted(operation.awaited())
                doing = check.doing(blamed)
                self._end(operation, blame.late(self.names, blamed, operation.deadline_s, self.me, doing))

    def _ask_all(self, tag: int) -> None:
        """Ask all peers whether they have begun an overdue operation."""
        operation = self._operations.get(tag)
        if operation is not None and not operation.ended and tag not in self._late:
            self._late[tag] = LivenessCheck(set(self.live), time.monotonic())
            self._tell(Question(tag))

    # The end -------------------------------------------------------------------------------------

    def _shut(self, over: WorkerError) -> None:
        with self._door:
            self._over = over
            waiting = [*self._operations.values(), *self._inbox]
        for operation in waiting:
            operation.end(over)
        with contextlib.suppress(Exception):
            self._announce_departure()
            self._linger()
        for connection in self.live.values():
            connection.sock.close()
        self._poll.close()
        self._wake_in.close()
        self._wake_out.close()

    def _announce_departure(self) -> None:
        """Drop queued messages, which belong to operations that were given up, and tell the peers."""
        for tag in self._operations:
            for connection in self.live.values():
                connection.forget(tag)
        reason = next((one for one in self._reasons if one.message in self._cause), None)
        if reason is None:
            self._tell(LeaveNotice(shortened(self._cause)))
        else:
            self._tell(LeaveNotice(shortened(reason.message), reason.ranks))

    def _linger(self) -> None:
        """Wait for acknowledgements: closing at once may reset a connection and lose data in flight."""
        deadline = time.monotonic() + _LINGER_S
        leaving = dict(self.live)
        shut: set[int] = set()
        while leaving and time.monotonic() < deadline:
            for rank, connection in list(leaving.items()):
                try:
                    if connection.wants_to_write:
                        connection.write()
                    elif rank not in shut:
                        connection.sock.shutdown(socket.SHUT_WR)
                        shut.add(rank)
                    _discard(connection.sock)
                    if rank in shut and not _unacknowledged_bytes(connection.sock):
                        del leaving[rank]
                except OSError:
                    del leaving[rank]
            if leaving:
                time.sleep(_LINGER_POLL_S)


def _idle() -> None:
    """The default: there is nothing to do now and then."""


def _nothing() -> bool:
    """The default: no group sums in shared memory."""
    return False


def _discard(sock: socket.socket) -> None:
    """Read and drop data: the kernel resets a connection that is closed with unread data."""
    with contextlib.suppress(BlockingIOError):
        while sock.recv(1 << 16):
            pass


def _unacknowledged_bytes(sock: socket.socket) -> int:
    """How many sent bytes the peer's kernel has not acknowledged."""
    answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4))
    return int(struct.unpack("i", answer)[0])


def _defect(error: Exception, where: str) -> WorkerError:
    defect = WorkerError(
        f"the thread that moves bytes failed: {type(error).__name__}: {error}",
        where=where,
        fix="report this as a defect",
    )
    defect.__cause__ = error
    return defect
