"""Lines that stay at the bottom of a terminal while other output scrolls above them.

The terminal itself keeps the two apart: it is told to scroll only the lines above (its scroll region). So a
script's output reaches the terminal byte for byte, with its carriage returns, colours and unfinished lines,
and what a user types is echoed where the script asked for it. The cursor stays there, too; to draw, it is
moved to the bottom and back within one write.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console, RenderableType

_SAVE, _RESTORE = "\x1b7", "\x1b8"  # the cursor, with its colours
_DOWN = "\x1bD"  # one line, scrolling if need be; unlike a newline it keeps the column
_PLAIN = "\x1b[0m"
_REST_OF_LINE, _REST_OF_SCREEN = "\x1b[K", "\x1b[J"
_SCROLL_ALL = "\x1b[r"
_LEAST_ABOVE = 3  # lines; a terminal that is lower has no pane


def can_have_pane(console: Console) -> bool:
    """Whether the console is a terminal that can be drawn on."""
    return console.is_terminal and not console.is_dumb_terminal and not console.legacy_windows


class Pane:
    """The bottom lines of a terminal. `show` draws them, `hide` gives them back."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines: Sequence[str] = ()
        self._size = (0, 0)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal; the console may know others, from COLUMNS and LINES."""
        try:
            size = os.get_terminal_size(self._console.file.fileno())
        except OSError:
            return self._console.size.width, self._console.size.height
        return size.columns, size.lines

    def show(self, what: RenderableType, *, again: bool = False) -> None:
        """Draw what is to be seen, if it differs from what is there, or if it is to be drawn again."""
        if not self._is_foreground():
            return
        size = width, height = self.size
        with self._console.capture() as captured:
            self._console.print(what, width=width)
        lines = captured.get().removesuffix("\n").split("\n")
        if height - len(lines) < _LEAST_ABOVE:
            self.hide()
            return
        moves = ""
        if len(lines) != len(self._lines) or size != self._size:
            moves = self._give_back() + _make_room(len(lines), height)
            self._size = size
        elif lines == self._lines and not again:
            return
        self._lines = lines
        self._write(moves + self._drawn())

    def hide(self) -> None:
        """Clear the lines and let the whole terminal scroll again."""
        if self._lines:
            self._write(self._give_back())
        self._lines = ()

    def _drawn(self) -> str:
        top = self._size[1] - len(self._lines) + 1
        rows = (
            f"\x1b[{top + index};1H{_PLAIN}{line}{_REST_OF_LINE}" for index, line in enumerate(self._lines)
        )
        return f"{_SAVE}{_scroll_to(top - 1)}{''.join(rows)}{_RESTORE}"

    def _give_back(self) -> str:
        if not self._lines:
            return ""
        top = self._size[1] - len(self._lines) + 1
        return f"{_SAVE}{_SCROLL_ALL}\x1b[{top};1H{_PLAIN}{_REST_OF_SCREEN}{_RESTORE}"

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def _is_foreground(self) -> bool:
        """Whether the terminal is ours to draw on: not while a shell runs us in the background."""
        try:
            return os.tcgetpgrp(self._console.file.fileno()) == os.getpgrp()
        except OSError:  # not a terminal that has jobs
            return True


def _make_room(lines: int, height: int) -> str:
    """Scroll until the bottom lines are free, and keep the cursor's place in the text."""
    return f"{_DOWN * lines}\x1b[{lines}A{_SAVE}{_scroll_to(height - lines)}{_RESTORE}"


def _scroll_to(line: int) -> str:
    """Scroll only the lines from the first to this one."""
    return f"\x1b[1;{line}r"
