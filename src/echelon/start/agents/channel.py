"""Carries messages over a pair of byte streams: those of a child process, or a socket's.

A message is its length in four bytes, then itself in MessagePack. Reading and writing never block: what
cannot be written yet is kept, and `poll` goes on with it. Over a network each message also carries a seal,
so that a stranger can change, repeat or leave out none (`comm/wire/seals.py`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import msgspec

from echelon.comm.wire.seals import MESSAGE, SEAL_BYTES, Keys, Seal, seals_of
from echelon.errors import Corrupt, PeerLost
from echelon.start.agents.protocol import Message

_LENGTH = struct.Struct("<I")
_LONGEST_BYTES = 256 << 20
_READ_BYTES = 1 << 18
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_encode = msgspec.msgpack.Encoder().encode


class Channel:
    """Messages to and from a peer, whom `peer` names in errors.

    `keys` are those of the connection; without them the streams are trusted. Several threads may send; one
    polls.
    """

    def __init__(self, read_fd: int, write_fd: int, *, peer: str, keys: Keys | None = None) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._peer = peer
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._seal: Seal | None = None
        self._check: Seal | None = None
        if keys is not None:
            self._seal, self._check = seals_of(keys)
        self._sent = 0
        self._heard = 0
        self._sending = threading.Lock()
        self.heard_at = time.monotonic()
        for fd in (read_fd, write_fd):
            os.set_blocking(fd, False)

    @property
    def unsent_bytes(self) -> int:
        """How much waits to be written."""
        return len(self._outgoing)

    def fileno(self) -> int:
        """The stream that messages come from, for `select`."""
        return self._read_fd

    @property
    def writes_to(self) -> int:
        """The stream that messages go to, for `select`."""
        return self._write_fd

    def send(self, message: Message) -> None:
        """Queue a message, and write what can be written now."""
        data = _encode(message)
        with self._sending:
            if self._seal is not None:
                self._sent += 1
                data += self._seal.of(self._sent, MESSAGE, data)
            self._outgoing += _LENGTH.pack(len(data)) + data
        self._write()

    def poll(
        self,
        timeout_s: float = 0.0,
        *,
        read: Sequence[socket.socket] = (),
        write: Sequence[socket.socket] = (),
    ) -> list[Message]:
        """The messages that have arrived, after at most so long; raises PeerLost when the peer is gone.

        It returns earlier when one of the others can be read or written.
        """
        writing = [self._write_fd] if self._outgoing else []
        reading = [self._read_fd, *(one.fileno() for one in read)]
        writing += [one.fileno() for one in write]
        readable, writable, _ = select.select(reading, writing, [], timeout_s)
        if self._write_fd in writable:
            self._write()
        if self._read_fd not in readable:
            return []
        try:
            data = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise self._gone(str(error)) from None
        if not data:
            raise self._gone("it closed the connection")
        self.heard_at = time.monotonic()
        self._incoming += data
        return self._messages()

    def flush(self, timeout_s: float) -> None:
        """Write all that waits, for at most so long."""
        until = time.monotonic() + timeout_s
        while self._outgoing and time.monotonic() < until:
            select.select([], [self._write_fd], [], max(0.0, until - time.monotonic()))
            self._write()

    def close(self) -> None:
        """Close both streams."""
        for fd in {self._read_fd, self._write_fd}:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _messages(self) -> list[Message]:
        found: list[Message] = []
        while len(self._incoming) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._incoming)
            if length > _LONGEST_BYTES:
                raise Corrupt(f"{self._peer} sent what is not a message", where=repr(self._start()))
            if len(self._incoming) < _LENGTH.size + length:
                break
            body = bytes(self._incoming[_LENGTH.size : _LENGTH.size + length])
            del self._incoming[: _LENGTH.size + length]
            if self._check is not None:
                self._heard += 1
                body, seal = body[:-SEAL_BYTES], body[-SEAL_BYTES:]
                if not self._check.fits(seal, self._heard, MESSAGE, body):
                    raise Corrupt(f"a message from {self._peer} was changed on its way", where=self._peer)
            try:
                found.append(_decoder.decode(body))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise Corrupt(f"{self._peer} sent what is not a message", where=str(error)) from None
        return found

    def _start(self) -> str:
        """The beginning of what arrived: a shell's greeting, most often."""
        return bytes(self._incoming[:200]).decode(errors="replace")

    def _write(self) -> None:
        with self._sending:
            while self._outgoing:
                try:
                    written = os.write(self._write_fd, memoryview(self._outgoing)[: 1 << 16])
                except BlockingIOError:
                    return
                except OSError as error:
                    raise self._gone(str(error)) from None
                del self._outgoing[:written]

    def _gone(self, why: str) -> PeerLost:
        return PeerLost(f"{self._peer} is gone: {why}", where=self._peer)
