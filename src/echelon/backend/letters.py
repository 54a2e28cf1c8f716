"""Messages from one worker to another, with tags: send, receive, receive from anybody.

The group delivers messages of one sender with one tag in order, to receives that name the sender. For a tag
with which a script receives from anybody, a receive is posted at every peer; whatever arrives there goes to
the first of the script's receives that fits, and a message that none wanted yet is kept.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from echelon.backend.matching import LetterMatching
from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import Group
from echelon.comm.wire import blame
from echelon.errors import MismatchedCalls

MOST_TAG = (1 << 31) - 1
_SHORTEST_S, _LONGEST_S = 2e-5, 2e-3


@dataclass(slots=True, eq=False)
class Receive:
    """A tensor that waits for a message. `source` is known when the message is there."""

    tensor: Tensor
    source: int = -1
    done: bool = False


class Letters:
    """One worker's messages to and from the other members of its group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._from_anybody: dict[int, _Tag] = {}

    def send(self, tensor: Tensor, peer: int, tag: int) -> Future[Any]:
        """Send a tensor; done when it may be changed."""
        return self._group.send(tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> tuple[Receive, Future[Any]]:
        """Receive a tensor; done when it is there. None: from anybody."""
        receive = Receive(tensor)
        with self._lock:
            if peer is not None and tag not in self._from_anybody:
                receive.source = peer
                return receive, self._group.receive(tensor, peer, tag)
            known = self._from_anybody.setdefault(tag, _Tag(self._group, tag))
            known.post(peer, receive)

        def wait(timeout_s: float | None) -> Tensor:
            begun = time.monotonic()
            while not self._arrived(known, receive):
                waited_s = time.monotonic() - begun
                if timeout_s is not None and waited_s > timeout_s:
                    raise self._late(known, peer, receive, timeout_s)
                time.sleep(min(max(waited_s / 16, _SHORTEST_S), _LONGEST_S))
            return tensor

        return receive, CallerFuture(wait, lambda: self._arrived(known, receive))

    def _arrived(self, known: _Tag, receive: Receive) -> bool:
        with self._lock:
            return receive.done or known.look(receive)

    def _late(self, known: _Tag, peer: int | None, receive: Receive, timeout_s: float) -> Exception:
        with self._lock:
            known.matching.withdraw(receive)
        me = self._group.names[self._group.rank]
        ranks = [rank for rank in range(self._group.size) if rank != self._group.rank]
        return blame.late(self._group.names, ranks if peer is None else [peer], timeout_s, me)


class _Tag:
    """The receives of one tag. Their sizes are those of the receives that asked for them."""

    def __init__(self, group: Group, tag: int) -> None:
        self.matching: LetterMatching[Receive, Tensor] = LetterMatching()
        self._group = group
        self._tag = tag
        self._posted: dict[int, tuple[Tensor, Future[Tensor]]] = {}

    def post(self, peer: int | None, receive: Receive) -> None:
        """A receive of the script."""
        found = self.matching.post(peer, self._tag, receive)
        if found is not None:
            self._hand_over(receive, *found)
            return
        for rank in range(self._group.size) if peer is None else [peer]:
            if rank != self._group.rank and rank not in self._posted:
                self._post(rank, receive.tensor)

    def look(self, receive: Receive) -> bool:
        """Take in what has arrived; whether that receive is done."""
        for rank, (room, future) in list(self._posted.items()):
            if future.done():
                del self._posted[rank]
                future.wait()
                wanted = self.matching.take(rank, self._tag)
                if wanted is None:
                    self.matching.keep(rank, self._tag, room)
                else:
                    self._hand_over(wanted, rank, room)
                waiting = self.matching.first(rank, self._tag)
                if waiting is not None:
                    self._post(rank, waiting.tensor)
        return receive.done

    def _post(self, rank: int, like: Tensor) -> None:
        room = like.new_empty(like.shape)
        self._posted[rank] = room, self._group.receive(room, rank, self._tag)

    def _hand_over(self, receive: Receive, source: int, room: Tensor) -> None:
        if room.numel() != receive.tensor.numel():
            raise MismatchedCalls(
                f"{self._group.names[source]} sent {room.numel()} elements where "
                f"{receive.tensor.numel()} were expected",
                ranks=(source,),
                where="recv",
                fix="receive messages of different sizes with different tags",
            )
        receive.tensor.detach().copy_(room.view(receive.tensor.shape))
        receive.source = source
        receive.done = True
