"""A relay between two workers, which reads all frames and can change, drop, repeat, reorder or add some."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from echelon.comm.wire import notices
from echelon.comm.wire.frames import HEADER_BYTES, Header
from echelon.comm.wire.seals import PAYLOAD, Checksum

_HANDSHAKE_BYTES = (57, 32)  # a hello; a proof, when the other side has answered
_LENGTH_AT = 56
_AFTER = 6  # frames that pass as they are


class Relay:
    """Listens at `port`; `how` is what it does to the frames of the worker that dials."""

    def __init__(self, target: tuple[str, int], how: str) -> None:
        self._how = how
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.frames = 0
        self.seen = b""
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        """Close all connections."""
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join()

    def _start(self, act, *args) -> None:
        thread = threading.Thread(target=act, args=args)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._listener.accept()
                answerer = socket.create_connection(self._target)
                self._sockets += [caller, answerer]
                self._start(self._pass, answerer, caller)
                self._start(self._meddle, caller, answerer)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        with contextlib.suppress(OSError):  # also if the other side has reset its connection
            target.shutdown(socket.SHUT_WR)

    def _meddle(self, source: socket.socket, target: socket.socket) -> None:
        held = b""
        with contextlib.suppress(OSError, EOFError):
            for count in _HANDSHAKE_BYTES:
                target.sendall(_exactly(source, count))
            while True:
                header = _exactly(source, HEADER_BYTES)
                (length,) = struct.unpack_from("<I", header, _LENGTH_AT)
                frame = header + _exactly(source, length)
                self.frames += 1
                self.seen = frame
                if self.frames == _AFTER and self._how == "reorder":
                    held = frame
                    continue
                target.sendall(self._changed(frame) + held)
                held = b""
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _changed(self, frame: bytes) -> bytes:
        if self.frames < _AFTER or self._how in ("read", "reorder"):
            return frame
        if self.frames == _AFTER:
            changed = {
                "change": frame[:-1] + bytes([frame[-1] ^ 1]),
                "drop": b"",
                "repeat": frame + frame,
                "farewell": self._farewell(frame) + frame,
            }
            return changed[self._how]
        return frame

    def _farewell(self, frame: bytes) -> bytes:
        """A notice that the worker leaves, with all that a stranger knows: the view and the number."""
        told, seal, number = notices.encode(notices.LeaveNotice()), Checksum(), self.frames - 1
        sealed = seal.of(number, PAYLOAD, told)
        return Header(frame[4:20], number, 0, 0, len(told), 0, len(told), sealed).pack(seal) + told


def _exactly(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = source.recv(count - len(data))
        if not part:
            raise EOFError
        data += part
    return data
