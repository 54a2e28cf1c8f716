"""Which message goes to which receive? Pure.

Messages of one sender with one tag are received in the order in which they were sent. A receive names a
sender or takes anybody's; it gets the first message that fits, and a message goes to the first receive that
fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")
P = TypeVar("P")


@dataclass(slots=True)
class _Waiting(Generic[R]):
    sender: int | None
    tag: int
    receive: R


@dataclass(slots=True)
class LetterMatching(Generic[R, P]):
    """Receives that wait for messages, and messages that wait for receives; never both for one tag."""

    _waiting: list[_Waiting[R]] = field(default_factory=list)
    _arrived: list[tuple[int, int, P]] = field(default_factory=list)

    def post(self, sender: int | None, tag: int, receive: R) -> tuple[int, P] | None:
        """The sender and payload of a message that waits for this receive; else the receive waits."""
        for at, (source, known, payload) in enumerate(self._arrived):
            if known == tag and sender in (None, source):
                del self._arrived[at]
                return source, payload
        self._waiting.append(_Waiting(sender, tag, receive))
        return None

    def take(self, source: int, tag: int) -> R | None:
        """The receive that a message belongs to, which waits no longer; None if there is none yet."""
        for at, waiting in enumerate(self._waiting):
            if waiting.tag == tag and waiting.sender in (None, source):
                del self._waiting[at]
                return waiting.receive
        return None

    def first(self, source: int, tag: int) -> R | None:
        """The receive that the sender's next message would belong to; it goes on waiting."""
        fits = (one for one in self._waiting if one.tag == tag and one.sender in (None, source))
        return next((one.receive for one in fits), None)

    def keep(self, source: int, tag: int, payload: P) -> None:
        """A message waits for a receive."""
        self._arrived.append((source, tag, payload))

    def withdraw(self, receive: R) -> None:
        """A receive is given up."""
        self._waiting = [waiting for waiting in self._waiting if waiting.receive is not receive]
