"""A program in a terminal of its own: type, and read what a user would see."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from screen import Screen

_WAIT_S = 120.0


class Terminal:
    """Starts a program as the foreground job of a new terminal; Ctrl-C reaches it as from a keyboard."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        width: int = 100,
        height: int = 30,
    ) -> None:
        self._keyboard, screen = os.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._screen = Screen(width, height)
        self._bytes = b""
        own = {key: value for key, value in env.items() if key not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**own, "TERM": "xterm"},
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)

    @property
    def shown(self) -> str:
        """What is to be seen now, with what has scrolled away above it."""
        return "\n".join([*self._screen.scrolled, *self._screen.lines]).rstrip()

    def press(self, text: str) -> None:
        """Type, as on a keyboard; Ctrl-C is "\\x03"."""
        os.write(self._keyboard, text.encode())

    def until(self, text: str, *, gone: bool = False, after: str = "") -> None:
        """Wait until a text is to be seen, behind another if one is given; with `gone`, until it is not."""
        deadline = time.monotonic() + _WAIT_S
        while (text in (self.shown.partition(after)[2] if after else self.shown)) == gone:
            assert time.monotonic() < deadline, f"waited {_WAIT_S:.0f} s for {text!r} in:\n{self.shown}"
            assert self._read(0.2), f"it has ended, and no {text!r} in:\n{self.shown}"

    def end(self) -> int:
        """Wait until the program has ended; returns its exit code."""
        deadline = time.monotonic() + _WAIT_S
        while self._read(0.2):
            assert time.monotonic() < deadline, f"it has not ended:\n{self.shown}"
        return self.process.wait(_WAIT_S)

    def close(self) -> None:
        """Leave nothing behind."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._keyboard)

    def _read(self, timeout_s: float) -> bool:
        """Read what has been written; returns whether there may be more."""
        if not select.select([self._keyboard], [], [], timeout_s)[0]:
            return True
        try:
            self._bytes += os.read(self._keyboard, 65536)
        except OSError:  # what a terminal says at its end
            return False
        try:
            text, self._bytes = self._bytes.decode(), b""
        except UnicodeDecodeError as error:  # the last character is not complete
            text, self._bytes = self._bytes[: error.start].decode(), self._bytes[error.start :]
        self._screen.write(text)
        return True
