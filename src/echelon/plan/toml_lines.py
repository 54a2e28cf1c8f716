"""On which line of a TOML text does each key stand? Python's own reader does not say.

The text must be valid TOML: the reader here skips values without checking them. A path is the keys from the
top, with numbers for the elements of arrays: `("workers", 2, "node")`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Path = tuple[str | int, ...]

_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")
_KEY = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|[A-Za-z0-9_-]+')
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL
)
_PLAIN = re.compile(r"[^\s,\]}#]+(?: \d[^\s,\]}#]*)?")  # a number, a word, or a date with its time


def lines_of(text: str) -> Mapping[Path, int]:
    """The line, from 1, of every key, table and array element."""
    reader = _LineReader(text)
    reader.document()
    return reader.lines


def line_of(lines: Mapping[Path, int], path: Path) -> int:
    """The line of a path, or of the nearest part above it that the text has; 1 for the whole."""
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path, 1)


@dataclass(slots=True)
class _LineReader:
    text: str
    at: int = 0
    lines: dict[Path, int] = field(default_factory=dict)
    counts: dict[Path, int] = field(default_factory=dict)

    def document(self) -> None:
        """All tables and keys."""
        table: Path = ()
        self._skip(_SPACE)
        while self.at < len(self.text):
            if self.text[self.at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_SPACE)

    def _header(self) -> Path:
        """`[table]` or `[[table]]`; returns its path, with the number of the element."""
        begin = self.at
        double = self.text.startswith("[[", begin)
        self.at += 2 if double else 1
        path = self._inside(self._keys())
        self.at += 2 if double else 1
        if double:
            number = self.counts.get(path, 0)
            self.counts[path] = number + 1
            self._note(path, begin)
            path = (*path, number)
        self._note(path, begin)
        return path

    def _inside(self, keys: Path) -> Path:
        """The path of a header: where a part of it is an array of tables, its last element is meant."""
        path: Path = ()
        for key in keys[:-1]:
            path = (*path, key)
            if path in self.counts:
                path = (*path, self.counts[path] - 1)
        return (*path, *keys[-1:])

    def _keys(self) -> Path:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            found = _KEY.match(self.text, self.at)
            if found is None:
                self.at = len(self.text)  # not TOML: nothing more can be said
                return tuple(keys)
            self.at = found.end()
            keys.append(found.group().strip("\"'"))
            self._skip(_BLANK)
            if not self.text.startswith(".", self.at):
                return tuple(keys)
            self.at += 1

    def _pair(self, table: Path) -> None:
        begin = self.at
        path = (*table, *self._keys())
        self._note(path, begin)
        self._skip(_BLANK)
        self.at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _value(self, path: Path) -> None:
        here = self.text[self.at : self.at + 1]
        if here == "[":
            self._elements(path, "]")
        elif here == "{":
            self._elements(path, "}")
        else:
            found = _STRING.match(self.text, self.at) or _PLAIN.match(self.text, self.at)
            self.at = found.end() if found else len(self.text)

    def _elements(self, path: Path, close: str) -> None:
        """What is between brackets or braces."""
        self.at += 1
        number = 0
        self._skip(_SPACE)
        while self.at < len(self.text) and self.text[self.at] != close:
            if close == "}":
                self._pair(path)
            else:
                self._note((*path, number), self.at)
                self._value((*path, number))
            number += 1
            self._skip(_SPACE)
            if self.text.startswith(",", self.at):
                self.at += 1
            self._skip(_SPACE)
        self.at += 1

    def _note(self, path: Path, at: int) -> None:
        line = self.text.count("\n", 0, at) + 1
        for length in range(1, len(path) + 1):  # [a.b] is also the first that is said of a
            self.lines.setdefault(path[:length], line)

    def _skip(self, what: re.Pattern[str]) -> None:
        found = what.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
