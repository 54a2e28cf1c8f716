"""Messages from one worker to another, with tags: send, receive, receive from anybody.

They travel in a mailbox of the group, in order for each pair. A message whose receive waits already goes
straight to its tensor; others are kept until they are asked for. Whoever waits for a message takes in those
of all receives, so that no thread is needed for that.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.backend.matching import Matching
from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import Group
from echelon.comm.wire import blame
from echelon.comm.wire.mailbox import Delivery, Mailbox
from echelon.errors import Corrupt, RoundTimeout

_TURN_S = 0.05
_NOTHING = memoryview(b"")
_EMPTY = memoryview(b"\0")


class Letter(msgspec.Struct, frozen=True, array_like=True):
    """What precedes a message: its tag, and how many bytes it has. An empty one is sent as one byte."""

    tag: int
    size: int


@dataclass(slots=True, eq=False)
class _Aside:
    """A message that began to arrive before its receive was posted."""

    receive: Receive | None = None
    payload: memoryview | None = None


@dataclass(slots=True, eq=False)
class Receive:
    """A tensor that waits for a message. `source` is known when the message is there."""

    tensor: Tensor
    flat: Tensor
    source: int = -1
    done: bool = False
    error: Exception | None = None

    @property
    def size_bytes(self) -> int:
        """The size of the message that fits."""
        return self.flat.numel() * self.flat.element_size()

    def end(self, error: Exception | None = None) -> None:
        """The message is in `flat`, or wrong."""
        self.error = error
        if error is None and self.flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(self.flat.view(self.tensor.shape))
        self.done = True


class Letters:
    """One worker's messages to and from the other members of its group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = threading.Lock()  # guards the matching
        self._turn = threading.Lock()  # held by the thread that takes messages in
        self._matching: Matching[Receive, _Aside] = Matching()
        self._coming: dict[int, deque[Receive | _Aside]] = {}  # messages on their way, by sender
        self._mailbox: Mailbox[Letter] = group.mailbox(Letter, self._place, among_workers=True)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Future[Any]:
        """Send a tensor; done when it may be changed."""
        future: Future[Any] = Future()
        data = _memory(tensor.detach().contiguous())
        if self._mailbox.error is not None:
            raise self._mailbox.error
        letter = Letter(tag, len(data))
        self._mailbox.send(peer, letter, data or _EMPTY, sent=lambda: future.complete(None))

        def wait(timeout_s: float | None) -> Any:
            until = _until(timeout_s)
            while not future.done():
                if self._mailbox.error is not None:
                    raise self._mailbox.error
                if time.monotonic() > until:
                    raise self._late((peer,), timeout_s)
                _wait_a_bit(future, until)
            return tensor

        return CallerFuture(wait, lambda: future.done() or self._mailbox.error is not None)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> tuple[Receive, Future[Any]]:
        """Receive a tensor; done when it is there. None: from anybody."""
        receive = Receive(tensor, tensor.detach().contiguous().view(-1))
        with self._lock:
            found = self._matching.post(peer, tag, receive)
            if found is not None:
                receive.source, aside = found
                aside.receive = receive
                if aside.payload is not None:
                    self._deliver(aside)

        def wait(timeout_s: float | None) -> Any:
            self._take_in(receive, peer, timeout_s)
            if receive.error is not None:
                raise receive.error
            return tensor

        return receive, CallerFuture(wait, lambda: self._arrived(receive))

    def _arrived(self, receive: Receive) -> bool:
        """Take in what is there already; whether that receive, or the mailbox, is over."""
        if not receive.done and self._turn.acquire(blocking=False):
            try:
                while not receive.done and self._mailbox.error is None:
                    delivery = self._mailbox.receive(0.0)
                    if delivery is None:
                        break
                    self._accept(delivery)
            finally:
                self._turn.release()
        return receive.done or self._mailbox.error is not None

    def _take_in(self, receive: Receive, peer: int | None, timeout_s: float | None) -> None:
        until = _until(timeout_s)
        while not receive.done:
            left_s = until - time.monotonic()
            if left_s <= 0:
                with self._lock:
                    self._matching.withdraw(receive)
                if not receive.done:
                    raise self._late(tuple(self._others()) if peer is None else (peer,), timeout_s)
            if not self._turn.acquire(timeout=min(_TURN_S, max(0.0, left_s))):
                continue
            try:
                while not receive.done and (left_s := until - time.monotonic()) > 0:
                    delivery = self._mailbox.receive(min(1.0, left_s))
                    if delivery is not None:
                        self._accept(delivery)
            finally:
                self._turn.release()

    # In the loop's thread ------------------------------------------------------------------------

    def _place(self, peer: int, letter: Letter, length: int) -> memoryview | None:
        """The message belongs to its receive from its first byte on: the next one may overtake no more."""
        with self._lock:
            receive = self._matching.take(peer, letter.tag)
            coming = self._coming.setdefault(peer, deque())
            if receive is not None:
                receive.source = peer
                if letter.size == receive.size_bytes and letter.size:
                    coming.append(receive)
                    return _memory(receive.flat)
                coming.append(_Aside(receive))
                return None
            coming.append(_Aside())
            self._matching.keep(peer, letter.tag, coming[-1])
            return None

    # In a thread that waits ----------------------------------------------------------------------

    def _accept(self, delivery: Delivery[Letter]) -> None:
        """Hand over a message that is here as a whole."""
        peer, letter, payload = delivery
        with self._lock:
            found = self._coming[peer].popleft()
            if isinstance(found, Receive):
                found.end()
                return
            found.payload = payload if letter.size else _NOTHING
            if found.receive is not None:
                self._deliver(found)

    def _deliver(self, aside: _Aside) -> None:
        receive, payload = aside.receive, aside.payload
        assert receive is not None
        assert payload is not None
        if len(payload) != receive.size_bytes:
            receive.end(self._wrong_size(receive.source, len(payload), receive))
            return
        if len(payload):
            _memory(receive.flat)[:] = payload
        receive.end()

    def _wrong_size(self, source: int, length: int, receive: Receive) -> Corrupt:
        return Corrupt(
            f"{self._group.names[source]} sent {length} bytes where {receive.size_bytes} were expected",
            ranks=(source,),
            where="recv",
            fix="give send and recv tensors of the same size and type",
        )

    def _others(self) -> list[int]:
        return [rank for rank in range(self._group.size) if rank != self._group.rank]

    def _late(self, ranks: tuple[int, ...], timeout_s: float | None) -> Exception:
        me = self._group.names[self._group.rank]
        return blame.late(self._group.names, ranks, timeout_s or 0.0, me)


def _memory(tensor: Tensor) -> memoryview:
    if not tensor.numel():
        return _NOTHING
    raw: npt.NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return raw.data


def _until(timeout_s: float | None) -> float:
    return time.monotonic() + (1e9 if timeout_s is None else timeout_s)


def _wait_a_bit(future: Future[Any], until: float) -> None:
    try:
        future.wait(min(_TURN_S, max(0.0, until - time.monotonic())))
    except RoundTimeout:
        return
