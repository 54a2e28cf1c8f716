"""Control messages between workers: departures, abandoned operations, and what workers are doing.

They are plain msgspec values; nothing is ever unpickled.
"""

from __future__ import annotations

import msgspec

from echelon.comm.wire.doing import Doing
from echelon.comm.wire.mismatch import Stage
from echelon.errors import Corrupt

_MOST_TEXT = 2000


class LeaveNotice(msgspec.Struct, frozen=True, tag=True):
    """The sender leaves. `cause` is its error, if any; `blamed`: the workers whose loss is the cause."""

    cause: str = ""
    blamed: tuple[int, ...] = ()


class GaveUp(msgspec.Struct, frozen=True, tag=True):
    """The sender has given up this operation because of these workers. `late`: they missed the deadline."""

    operation: int
    blamed: tuple[int, ...]
    text: str
    late: bool = False


class Question(msgspec.Struct, frozen=True, tag=True):
    """The deadline of this operation has passed: has the receiver begun it?"""

    operation: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Whether the sender has begun that operation, and what it is doing."""

    operation: int
    begun: bool
    doing: Doing = Doing()


class DoingQuestion(msgspec.Struct, frozen=True, tag=True):
    """The sender has been blocked on this operation for a while: what is the receiver doing?

    `number` is repeated in the answer. `trained`: the sender's training thread has begun the operation,
    not a codec thread.
    """

    number: int
    operation: int
    trained: bool = True


class Blocked(msgspec.Struct, frozen=True):
    """The sender's training thread is blocked until this operation ends.

    wait          the number of the wait: another one after each that has ended
    requires_you  the operation cannot end without the receiver
    trained       as in the question
    """

    operation: int
    wait: int
    requires_you: bool
    trained: bool = True


class DoingAnswer(msgspec.Struct, frozen=True, tag=True):
    """What the sender is doing, how far it is with the operation, and what it is blocked on itself.

    `may_begin`: a thread of it that is not blocked might begin the operation. `failed`: the error that has
    ended its loop, after which it does nothing; empty if none has. `times_left`: how often errors have.
    """

    number: int
    doing: Doing
    stage: Stage
    may_begin: bool
    blocked: Blocked | None = None
    failed: str = ""
    times_left: int = 0


class DifferentCalls(msgspec.Struct, frozen=True, tag=True):
    """The sender is certain that workers make different calls. All of them raise this error."""

    ranks: tuple[int, ...]
    text: str
    where: str
    fix: str


Notice = LeaveNotice | GaveUp | Question | Answer | DoingQuestion | DoingAnswer | DifferentCalls

_decoder: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(notice: Notice) -> bytes:
    """The bytes of a notice."""
    return msgspec.msgpack.encode(notice)


def decode(data: bytes | bytearray | memoryview, *, peer: str) -> Notice:
    """The notice that a peer sent."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{peer} sent a control message that cannot be decoded", where=str(error)) from None


def shortened(text: str) -> str:
    """The text, cut to what a notice may hold."""
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."
