"""The thread that moves bytes: all connections of a worker, and the operations under way over them.

One thread serves all peers, so that none blocks another and no two of our threads fight for the
interpreter lock. It sleeps in the kernel until a socket is ready or somebody submits an operation.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping

from echelon.comm.connection import Connection
from echelon.errors import Corrupt, PeerLost, StaleView, WorkerError

_TICK_S = 0.1
_log = logging.getLogger(__name__)


class Operation(ABC):
    """Something that a group does together. All methods but `wait` run in the loop's thread."""

    def __init__(self, tag: int, deadline_s: float) -> None:
        self.tag = tag
        self.deadline_s = deadline_s
        self.deadline = time.monotonic() + deadline_s
        self.error: Exception | None = None
        self._ended = threading.Event()

    @abstractmethod
    def begin(self, connections: Mapping[int, Connection]) -> None:
        """Queue the first messages."""

    @abstractmethod
    def peers(self) -> set[int]:
        """Those from whom something is still awaited, or to whom something is still to go."""

    def end(self, error: Exception | None = None) -> None:
        """It is over."""
        self.error = error
        self._ended.set()

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Block until it is over, by success, failure or deadline."""
        # The loop ends it at the deadline; the margin is for a loop that is itself held up.
        if not self._ended.wait(max(0.0, self.deadline - time.monotonic()) + 5.0):
            self.error = PeerLost("the thread that moves bytes is stuck", fix="report this as a defect")
        if self.error is not None:
            raise self.error


class Loop:
    """Owns the connections. `names` says how peers are called in errors."""

    def __init__(self, connections: Mapping[int, Connection], names: Mapping[int, str]) -> None:
        self.connections = dict(connections)
        self._names = names
        self._lost: dict[int, WorkerError] = {}
        self._operations: dict[int, Operation] = {}
        self._inbox: deque[Operation] = deque()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._poll = select.epoll()
        self._poll.register(self._wake_in.fileno(), select.EPOLLIN)
        self._by_fd: dict[int, int] = {}
        self._writing: set[int] = set()
        for rank, connection in self.connections.items():
            self._by_fd[connection.sock.fileno()] = rank
            self._poll.register(connection.sock.fileno(), select.EPOLLIN)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="echelon-wire", daemon=True)
        self._thread.start()

    def submit(self, operation: Operation) -> None:
        """Start an operation. Its deadline runs from now on."""
        operation.deadline = time.monotonic() + operation.deadline_s
        self._inbox.append(operation)
        self._wake()

    def check(self) -> None:
        """Raise if any peer is gone."""
        for error in self._lost.values():
            raise error

    def close(self) -> None:
        """End everything at once. Whoever waits is told."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        self._thread.join(timeout=5.0)

    def _wake(self) -> None:
        try:
            self._wake_out.send(b"\0")
        except OSError:
            return

    def _run(self) -> None:
        try:
            while not self._closing:
                for fd, event in self._poll.poll(_TICK_S):
                    self._serve(fd, event)
                while self._inbox:
                    self._begin(self._inbox.popleft())
                self._flush()
                self._check_deadlines()
        except Exception:  # noqa: BLE001 - whoever waits must learn of it, whatever it was
            _log.exception("the thread that moves bytes failed")
        finally:
            self._shut()

    def _serve(self, fd: int, event: int) -> None:
        if fd == self._wake_in.fileno():
            self._wake_in.recv(4096)
            return
        rank = self._by_fd.get(fd)
        if rank is None:
            return
        try:
            if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                self.connections[rank].read()
        except (OSError, Corrupt, StaleView) as error:
            self._lose(rank, error)

    def _begin(self, operation: Operation) -> None:
        self._operations[operation.tag] = operation
        try:
            operation.begin(self.connections)
        except OSError as error:
            self._end(operation, PeerLost(str(error)))
            return
        # Only now: a peer that has left may have sent before all that is wanted of it.
        gone = operation.peers() & self._lost.keys()
        if gone and not operation.ended:
            self._end(operation, self._lost[min(gone)])

    def _flush(self) -> None:
        """Write whatever can be written, and ask to be woken for the rest."""
        again = True
        while again:  # what was sent ends steps, whose successors want to send
            again = False
            for rank, connection in list(self.connections.items()):
                if rank in self._lost or not connection.wants_to_write:
                    continue
                try:
                    connection.write()
                except OSError as error:
                    self._lose(rank, error)
                again = again or connection.progressed
        for rank, connection in self.connections.items():
            if rank not in self._lost:
                self._interest(connection)
        for tag in [tag for tag, operation in self._operations.items() if operation.ended]:
            del self._operations[tag]

    def _interest(self, connection: Connection) -> None:
        writing = select.EPOLLOUT if connection.wants_to_write else 0
        wanted = (0 if connection.paused else select.EPOLLIN) | writing
        if wanted != connection.interest:
            connection.interest = wanted
            self._poll.modify(connection.sock.fileno(), wanted)

    def _lose(self, rank: int, error: Exception) -> None:
        """A peer is gone: every operation that needs it ends now."""
        if rank in self._lost:
            return
        name = self._names[rank]
        if isinstance(error, WorkerError):
            error.ranks = (rank,)
            self._lost[rank] = error
        else:
            self._lost[rank] = PeerLost(f"{name} is gone: {error}", ranks=(rank,))
        connection = self.connections[rank]
        self._poll.unregister(connection.sock.fileno())
        self._by_fd.pop(connection.sock.fileno(), None)
        connection.sock.close()
        for operation in list(self._operations.values()):
            if rank in operation.peers():
                self._end(operation, self._lost[rank])

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for operation in list(self._operations.values()):
            if now > operation.deadline:
                awaited = sorted(operation.peers())
                names = ", ".join(self._names[rank] for rank in awaited)
                self._end(
                    operation, TimeoutError(f"timed out after {operation.deadline_s:g} s for {names}")
                )

    def _end(self, operation: Operation, error: Exception) -> None:
        for connection in self.connections.values():
            connection.forget(operation.tag)
        self._operations.pop(operation.tag, None)
        operation.end(error)

    def _shut(self) -> None:
        for operation in [*self._operations.values(), *self._inbox]:
            operation.end(PeerLost("this worker has left the group"))
        for rank, connection in self.connections.items():
            if rank not in self._lost:
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_WR)
                connection.sock.close()
        self._poll.close()
        self._wake_in.close()
        self._wake_out.close()
