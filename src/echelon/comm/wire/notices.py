"""Control messages between workers: departures, abandoned operations, and liveness questions and answers.

They are plain msgspec values; nothing is ever unpickled.
"""

from __future__ import annotations

import msgspec

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
    """Whether the sender has begun that operation."""

    operation: int
    begun: bool


Notice = LeaveNotice | GaveUp | Question | Answer

_decoder: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(notice: Notice) -> bytes:
    """The bytes of a notice."""
    return msgspec.msgpack.encode(notice)


def decode(data: bytes | bytearray | memoryview, *, peer: str) -> Notice:
    """The notice that a peer sent."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{peer} sent a control message that cannot be decoded", where=str(error)) from None


def shortened(text: str) -> str:
    """The text, cut to what a notice may hold."""
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."
