"""What workers tell each other while they meet: values by key, and counters. Requests and replies, typed.

`MeetingBoard` decides and does no I/O: a request in, a reply out. `decode_request` and `decode_reply` read
bytes of a peer that has proved itself, and still believe nothing: unknown types, long keys and values, and
boards that grow without end are refused. A further kind of message is one more class here, and one more
case in `MeetingBoard.answer`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Protocol, TypeVar

import msgspec

from echelon.errors import Corrupt, WorkerError

LONGEST_MESSAGE_BYTES = 1 << 20
_ID_BYTES = 16
_LONGEST_KEY = 8192  # a path is part of some
_MOST_KEYS = 200_000
_MOST_BYTES = 256 << 20
_LOOK_S = 0.01
T = TypeVar("T")


class Store(Protocol):
    """Where a rendezvous keeps what workers tell each other: the meeting service, or a store of torch's."""

    def set(self, key: str, value: str, /) -> object:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value."""

    def add(self, key: str, count: int, /) -> int:
        """Add to a counter, which begins at 0; returns its new value."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all these values are there."""


class PrefixedStore:
    """The part of a store whose keys begin with a prefix."""

    def __init__(self, prefix: str, store: Store) -> None:
        self.store = store
        self._prefix = prefix + "/"

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self.store.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        return self.store.get(self._prefix + key)

    def add(self, key: str, count: int) -> int:
        """Add to a counter; returns its new value."""
        return int(self.store.add(self._prefix + key, count))

    def check(self, keys: list[str]) -> bool:
        """Whether all these values are there."""
        return bool(self.store.check([self._prefix + key for key in keys]))


class BoardError(RuntimeError):
    """The meeting has ended, or a value did not come in time."""


class BoardStore(ABC):
    """A store whose values are on a board, wherever that is."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    @abstractmethod
    def ask(self, request: Request) -> Reply:
        """Have a request carried out; raises BoardError if the meeting has ended."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._ask(SetValue(key, value.encode() if isinstance(value, str) else value))

    def get(self, key: str) -> bytes:
        """Wait for a value, for a limited time."""
        until = time.monotonic() + self._timeout_s
        while True:
            reply = self._ask(GetValue(key))
            if isinstance(reply, ValueReply) and reply.value is not None:
                return reply.value
            if time.monotonic() > until:
                raise BoardError(f"no worker has written {key!r} within {self._timeout_s:g} s")
            time.sleep(_LOOK_S)

    def add(self, key: str, count: int) -> int:
        """Add to a counter, which begins at 0; returns its new value."""
        return self._count(AddCount(key, count))

    def check(self, keys: list[str]) -> bool:
        """Whether all these values are there."""
        return bool(self._count(CheckKeys(keys)))

    def _count(self, request: Request) -> int:
        reply = self._ask(request)
        return reply.count if isinstance(reply, CountReply) else 0

    def _ask(self, request: Request) -> Reply:
        reply = self.ask(request)
        if isinstance(reply, RefusalReply):
            raise WorkerError(f"the leader refused what this worker wrote: {reply.reason}", ranks=(0,))
        return reply


class SetValue(msgspec.Struct, frozen=True, tag="set"):
    """Write a value."""

    key: str
    value: bytes


class GetValue(msgspec.Struct, frozen=True, tag="get"):
    """Read a value, if it is there."""

    key: str


class AddCount(msgspec.Struct, frozen=True, tag="add"):
    """Add to a counter."""

    key: str
    count: int


class CheckKeys(msgspec.Struct, frozen=True, tag="check"):
    """Ask whether all these values are there."""

    keys: list[str]


class ValueReply(msgspec.Struct, frozen=True, tag="value"):
    """A value; None if it is not there."""

    value: bytes | None = None


class CountReply(msgspec.Struct, frozen=True, tag="count"):
    """A counter's new value; for a question, 1 is yes and 0 no."""

    count: int = 0


class RefusalReply(msgspec.Struct, frozen=True, tag="refused"):
    """Why a request is not carried out."""

    reason: str


Request = SetValue | GetValue | AddCount | CheckKeys
Reply = ValueReply | CountReply | RefusalReply
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
encode = msgspec.msgpack.Encoder().encode


def decode_request(data: bytes, *, peer: str) -> Request:
    """Read a request; raises Corrupt."""
    try:
        return _requests.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Corrupt(f"{peer} sent what is not a request", where=str(error)) from None


def decode_reply(data: bytes, *, peer: str) -> Reply:
    """Read a reply; raises Corrupt."""
    try:
        return _replies.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Corrupt(f"{peer} sent what is not a reply", where=str(error)) from None


def decode_value(data: bytes | str, of: type[T], *, key: str, peer: str) -> T:
    """Read a value that `peer` wrote under a key, as JSON; raises Corrupt."""
    try:
        return msgspec.json.decode(data, type=of)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise _damaged(key, peer, str(error)) from None


def decode_text(data: bytes, *, key: str, peer: str) -> str:
    """Read a text that `peer` wrote under a key; raises Corrupt."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _damaged(key, peer, str(error)) from None


def decode_id(data: bytes | str, *, key: str, peer: str) -> bytes:
    """Read the id of a view, 16 bytes in hexadecimal digits; raises Corrupt."""
    text = data if isinstance(data, str) else decode_text(data, key=key, peer=peer)
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != _ID_BYTES:
        raise _damaged(key, peer, f"{text[:80]!r} is not an id")
    return found


def _damaged(key: str, peer: str, problem: str) -> Corrupt:
    return Corrupt(
        f"what {peer} has written under {key!r} at the meeting cannot be read",
        where=problem,
        fix="run the same version of Echelon on all machines",
    )


class MeetingBoard:
    """Values and counters by key."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def answer(self, request: Request) -> Reply:
        """Carry out a request."""
        with self._lock:
            match request:
                case SetValue():
                    return self._set(request.key, request.value)
                case GetValue():
                    return ValueReply(self._values.get(request.key))
                case AddCount():
                    return self._add(request.key, request.count)
                case CheckKeys():
                    return CountReply(int(all(key in self._values for key in request.keys)))

    def _add(self, key: str, count: int) -> Reply:
        try:
            total = int(self._values.get(key, b"0")) + count
        except ValueError:
            return RefusalReply(f"{key!r} is not a counter")
        if not count and key not in self._values:
            return CountReply(total)
        refusal = self._set(key, str(total).encode())
        return refusal if isinstance(refusal, RefusalReply) else CountReply(total)

    def _set(self, key: str, value: bytes) -> Reply:
        grown = self._bytes + len(value) - len(self._values.get(key, b""))
        full = key not in self._values and len(self._values) >= _MOST_KEYS
        if len(key) > _LONGEST_KEY or grown > _MOST_BYTES or full:
            return RefusalReply("the meeting holds too much, or a key is too long")
        self._bytes = grown
        self._values[key] = value
        return ValueReply()
