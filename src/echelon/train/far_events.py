"""How do the events of workers that do not share the leader's disk get into its record?

Such a worker writes its events to a temporary folder. A thread of it sends what was added, twice a second
and at its end, over a stream of its own (`comm/meet/stream.py`). A thread of the leader writes it to the
run's folder. When the leader ends, it waits a short time for the others to end, and asks those that do not
for what they have.

On the stream a message is a `Grown` in MessagePack, with a seal (`comm/wire/sealed.py`). An empty message
says that all events so far have been sent. The leader sends one message: the question for them.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import shutil
import socket
import threading
from collections.abc import Callable, Mapping

import msgspec

from echelon.comm.meet.credentials import Link
from echelon.comm.wire.sealed import MessageReader, MessageWriter
from echelon.errors import Corrupt
from echelon.observe.growth import FolderTail, read_grown, write_grown
from echelon.observe.run_folder import RunFolder

_LONGEST_BYTES = 16 << 20
_READ_BYTES = 1 << 18
_EVERY_S = 0.5
_SEND_S = 20.0
_LAST_S = 5.0
_ASK = b"?"
_log = logging.getLogger(__name__)


class EventSender:
    """Sends what a worker's folder gains to the leader. `flush` writes the events that are pending."""

    def __init__(self, leader: Link, folder: RunFolder, flush: Callable[[], None]) -> None:
        self._leader = leader.sock
        self._writer = MessageWriter(leader.keys)
        self._reader = MessageReader(leader.keys, peer="the leader", longest_bytes=len(_ASK))
        self._folder = folder
        self._flush = flush
        self._tail = FolderTail(folder.path)
        self._encode = msgspec.msgpack.Encoder().encode
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="echelon-events", daemon=True)
        self._leader.settimeout(_SEND_S)
        self._thread.start()

    def close(self) -> None:
        """Send the rest, wait until the leader has it, and remove the folder."""
        self._wake_out.close()
        self._thread.join(_SEND_S + _LAST_S)
        self._leader.close()
        self._wake_in.close()
        shutil.rmtree(self._folder.path.parent, ignore_errors=True)

    def _run(self) -> None:
        answered = False  # the leader ends, and has got what there was
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(self._leader, selectors.EVENT_READ)
                ready.register(self._wake_in, selectors.EVENT_READ)
                while True:
                    found = {key.fileobj for key, _ in ready.select(_EVERY_S)}
                    asked = False
                    if self._leader in found:
                        data = self._leader.recv(_READ_BYTES)
                        if not data:
                            return  # the leader has ended
                        asked = any(self._reader.messages(data))
                    if self._wake_in in found:
                        break
                    self._send_grown(asked=asked)
                    answered = answered or asked
            self._send_grown(asked=True)
            self._leader.shutdown(socket.SHUT_WR)
            self._leader.settimeout(_LAST_S)
            while self._leader.recv(_READ_BYTES):  # the leader closes the stream when it has all
                pass
        except (OSError, Corrupt) as error:
            if not answered:
                _log.warning("no more events can be sent to the leader: %s", error)

    def _send_grown(self, *, asked: bool) -> None:
        if asked:
            self._flush()
        sent = True
        while sent:  # a file is read in parts
            sent = False
            for part in self._tail.grown():
                self._leader.sendall(self._writer.sealed(self._encode(part)))
                sent = asked
        if asked:
            self._leader.sendall(self._writer.sealed(b""))


class EventReceiver:
    """Writes what other workers send to the run's folder. `senders` are their streams, by rank."""

    def __init__(self, senders: Mapping[int, Link], folder: RunFolder, names: Mapping[int, str]) -> None:
        self._live = {rank: link.sock for rank, link in senders.items()}
        self._folder = folder
        self._names = names
        self._readers = {
            rank: MessageReader(link.keys, peer=names[rank], longest_bytes=_LONGEST_BYTES)
            for rank, link in senders.items()
        }
        self._writers = {rank: MessageWriter(link.keys) for rank, link in senders.items()}
        self._behind = set(senders)  # those that have not said that all is sent
        self._changed = threading.Condition()
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="echelon-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait a short time until all have sent the rest, ask those that go on for it, and close."""
        with self._changed:
            self._changed.wait_for(lambda: not self._live, _LAST_S)
            self._behind = set(self._live)
            self._wake_out.send(_ASK)
            self._changed.wait_for(lambda: not self._behind, _LAST_S)
            late = sorted(self._behind)
        self._wake_out.close()
        self._thread.join(_LAST_S)
        self._wake_in.close()
        if late:
            names = ", ".join(self._names[rank] for rank in late)
            _log.warning("the last events of %s did not arrive within %g s", names, _LAST_S)

    def _run(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._wake_in, selectors.EVENT_READ)
            for rank, sender in self._live.items():
                ready.register(sender, selectors.EVENT_READ, rank)
            stopped = False
            while not stopped:
                for key, _ in ready.select():
                    if key.data is None:
                        stopped = not self._wake_in.recv(1)
                        self._ask()
                    elif not self._read(key.data):
                        ready.unregister(key.fileobj)
                        self._end(key.data)
        for rank in list(self._live):
            self._end(rank)

    def _ask(self) -> None:
        for rank, sender in self._live.items():
            with contextlib.suppress(OSError):  # it has ended
                sender.send(self._writers[rank].sealed(_ASK))

    def _read(self, rank: int) -> bool:
        """Take what has arrived; False if no more will come."""
        try:
            while data := self._live[rank].recv(_READ_BYTES):
                for message in self._readers[rank].messages(data):
                    self._take(rank, message)
        except BlockingIOError:
            return True
        except (OSError, Corrupt) as error:
            _log.warning("no more events of %s can be recorded: %s", self._names[rank], error)
        return False

    def _take(self, rank: int, message: bytes) -> None:
        if message:
            write_grown(self._folder.path, read_grown(message), [rank])
            return
        with self._changed:
            self._behind.discard(rank)
            self._changed.notify_all()

    def _end(self, rank: int) -> None:
        with self._changed:
            self._live.pop(rank).close()
            self._behind.discard(rank)
            self._changed.notify_all()
