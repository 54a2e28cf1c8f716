"""What a stranger does at a port: each attack is a function of an address that leaves connections open.

The process that attacks is one more warm worker. It and the workers tell each other by files in the folder
that they share how far they are.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
from pathlib import Path

_WAIT_S = 90.0


def tell(name: str, text: str = "") -> None:
    """Write a file, whole."""
    Path(f"{name}.tmp").write_text(text)
    Path(f"{name}.tmp").rename(name)


def wait_until(name: str, *, or_until: str = "") -> str:
    """What the file says, once it is there."""
    until = time.monotonic() + _WAIT_S
    while not Path(name).exists():
        if or_until and Path(or_until).exists():
            return ""
        assert time.monotonic() < until, f"no file {name} within {_WAIT_S:g} s"
        time.sleep(0.01)
    return Path(name).read_text()


class files_limited_to:  # noqa: N801 - reads as words
    """As many files as this process may open."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(self._count, self._before[1]), self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._before)


def dial(address: tuple[str, int]) -> socket.socket:
    """A connection, as soon as somebody listens."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            assert time.monotonic() < until, f"nobody listens at {address}"
            time.sleep(0.01)


def send(address: tuple[str, int], data: bytes) -> None:
    """Send bytes, and hear what comes until the other side hangs up, for a short time."""
    with contextlib.suppress(OSError), dial(address) as sock:
        sock.settimeout(0.5)
        sock.sendall(data)
        while sock.recv(4096):
            pass


def hello(view: bytes = bytes(16), rank: int = 1) -> bytes:
    """A hello, as a worker sends it."""
    return struct.pack("<4s16sI?32s", b"ECHI", view, rank, True, os.urandom(32))


def junk(address: tuple[str, int], *, opening: bytes = b"", view: bytes = bytes(16)) -> None:
    """What other programs, old versions and guessing strangers send."""
    send(address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    send(address, os.urandom(3000))
    send(address, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(200))  # TLS
    send(address, opening + hello(view) + bytes(32))  # a wrong proof
    send(address, opening + hello(view, rank=0xFFFFFFFF) + os.urandom(32))
    send(address, opening)


def idle(address: tuple[str, int], count: int) -> list[socket.socket]:
    """Connections that never say anything."""
    opened = []
    for _ in range(count):
        try:
            opened.append(socket.create_connection(address, timeout=2))
        except OSError:
            break  # the other side's queue is full: it is as well
    return opened


class SlowTalk:
    """Connections that send one byte at a time, for as long as it is open."""

    def __init__(self, address: tuple[str, int], count: int, data: bytes) -> None:
        self._sockets = idle(address, count)
        self._data = data
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        for byte in self._data:
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    sock.send(bytes([byte]))
            if self._over.wait(0.1):
                return

    def close(self) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()


class Impostor:
    """Listens where a redirected address leads, and answers like a worker, with a guessed proof."""

    def __init__(self, *, rank: int = 0, first: bytes = b"") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._rank = rank
        self._first = first
        self.heard = b""
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._listener.accept()[0] as caller, contextlib.suppress(OSError):
                    caller.settimeout(5)
                    if self._first:
                        caller.recv(len(self._first), socket.MSG_WAITALL)
                        caller.sendall(self._first)
                    theirs = caller.recv(57, socket.MSG_WAITALL)
                    caller.sendall(hello(theirs[4:20], self._rank))
                    self.heard += theirs + caller.recv(32, socket.MSG_WAITALL)
                    caller.sendall(os.urandom(32))

    def close(self) -> None:
        """Stop."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
