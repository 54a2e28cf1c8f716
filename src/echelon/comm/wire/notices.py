"""What workers tell each other beside the payload: that they leave, that they gave an operation up, and,
when a deadline has passed, who of them is there. Plain values (msgspec), never unpickled.
"""

from __future__ import annotations

import msgspec

from echelon.errors import Corrupt

_MOST_TEXT = 2000


class Departure(msgspec.Struct, frozen=True, tag=True):
    """I leave. `cause` is empty if all is well; `blamed` are those whose loss is the cause."""

    cause: str = ""
    blamed: tuple[int, ...] = ()


class GaveUp(msgspec.Struct, frozen=True, tag=True):
    """I have given this operation up, because of these workers. `late`: they did not arrive in time."""

    operation: int
    blamed: tuple[int, ...]
    text: str
    late: bool = False


class Question(msgspec.Struct, frozen=True, tag=True):
    """My deadline for this operation has passed: are you in it?"""

    operation: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Whether I am in that operation, or have been."""

    operation: int
    here: bool


Notice = Departure | GaveUp | Question | Answer

_decoder: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(notice: Notice) -> bytes:
    """The bytes of a notice."""
    return msgspec.msgpack.encode(notice)


def decode(data: bytes | bytearray | memoryview, *, peer: str) -> Notice:
    """The notice that a peer sent."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{peer} sent a notice that makes no sense", where=str(error)) from None


def shortened(text: str) -> str:
    """A text that is not too long for a notice."""
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "..."
