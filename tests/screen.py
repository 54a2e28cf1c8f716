"""A terminal as a table of characters: what a user sees after a program has written to it.

It knows the few control sequences that Echelon uses, and fails on others.
"""

from __future__ import annotations

import re

_SEQUENCE = re.compile(r"\x1b(?:\[(?P<digits>[0-9;?]*)(?P<letter>[A-Za-z])|(?P<plain>[78D]))")
_BEGINNING = re.compile(r"\x1b(?:\[[0-9;?]*)?$")


class Screen:
    """Rows of text, a cursor, and the rows that scroll; `scrolled` are the rows that have left the top."""

    def __init__(self, width: int = 80, height: int = 24) -> None:
        self.width, self.height = width, height
        self.scrolled: list[str] = []
        self._rows = [[" "] * width for _ in range(height)]
        self._row = self._column = 0
        self._saved = (0, 0)
        self._unread = ""
        self._top, self._bottom = 0, height - 1

    @property
    def lines(self) -> list[str]:
        """What is to be seen, without blanks at the ends of lines."""
        return ["".join(row).rstrip() for row in self._rows]

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column, from 0."""
        return self._row, self._column

    def write(self, text: str) -> None:
        """Show text as a terminal does whose driver turns a newline into a return and a line feed."""
        text, self._unread = self._unread + text, ""
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = _SEQUENCE.match(text, at)
                if found is None and _BEGINNING.match(text, at):
                    self._unread = text[at:]
                    return
                assert found is not None, f"unknown sequence: {text[at : at + 8]!r}"
                self._control(found)
                at = found.end()
            else:
                self._put(text[at])
                at += 1

    def _put(self, character: str) -> None:
        if character == "\n":
            self._column = 0
            self._down()
        elif character == "\r":
            self._column = 0
        else:
            if self._column == self.width:
                self._column = 0
                self._down()
            self._rows[self._row][self._column] = character
            self._column += 1

    def _down(self) -> None:
        if self._row == self._bottom:
            gone = self._rows.pop(self._top)
            if self._top == 0:
                self.scrolled.append("".join(gone).rstrip())
            self._rows.insert(self._bottom, [" "] * self.width)
        elif self._row < self.height - 1:
            self._row += 1

    def _control(self, found: re.Match[str]) -> None:
        numbers = [int(number) for number in (found["digits"] or "").split(";") if number.isdigit()]
        match found["letter"] or found["plain"]:
            case "7":
                self._saved = self._row, self._column
            case "8":
                self._row, self._column = self._saved
            case "D":
                self._down()
            case "A":
                self._row = max(0, self._row - (numbers or [1])[0])
            case "H":
                self._row, self._column = (n - 1 for n in (numbers or [1, 1]))
            case "r":
                self._top, self._bottom = (n - 1 for n in (numbers or [1, self.height]))
                self._row = self._column = 0
            case "K":
                self._rows[self._row][self._column :] = [" "] * (self.width - self._column)
            case "J":
                self._rows[self._row][self._column :] = [" "] * (self.width - self._column)
                for row in self._rows[self._row + 1 :]:
                    row[:] = [" "] * self.width
            case "m":
                pass
            case other:
                raise AssertionError(f"unknown sequence: {other!r}")
