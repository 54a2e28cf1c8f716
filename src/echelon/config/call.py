"""The syntax that names a strategy and its options: `name`, `name(1, key=value)`, nested at will.

    call  = name [ "(" [ arg { "," arg } ] ")" ]
    arg   = [ key "=" ] value
    value = number | true | false | none | "quoted" | [ value, ... ] | call | bare word

A value that is itself a call stays text, in canonical form; the strategy that owns the option parses it
with the registry it needs. Parsing and printing are inverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from echelon.errors import ConfigError

Value: TypeAlias = "int | float | bool | str | None | list[Value]"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_BARE = re.compile(r"[^\s,()\[\]=\"']+")
_KEY = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*)\s*=")
_MAX_DEPTH = 10  # no strategy nests deeper; the time to print doubles with each level
_WORDS: dict[str, Value] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True, slots=True)
class Call:
    """A strategy's name with its arguments, as the user wrote them."""

    name: str
    args: tuple[Value, ...] = ()
    options: Mapping[str, Value] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [_text(arg) for arg in self.args]
        parts += [f"{key}={_text(value)}" for key, value in self.options.items()]
        return f"{self.name}({', '.join(parts)})" if parts else self.name


def parse_call(text: str) -> Call:
    """Parse a whole call; a ConfigError points at the first character that cannot be read."""
    reader = _Reader(text)
    call = reader.call()
    reader.end()
    return call


def _text(value: Value) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if not isinstance(value, str):
        return repr(value)
    if _reads_back(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


@lru_cache(maxsize=1024)
def _reads_back(text: str) -> bool:
    """Whether the text, without quotes, parses as the same string."""
    try:
        reader = _Reader(text)
        value = reader.value()
        reader.end()
    except ConfigError:
        return False
    return value == text and isinstance(value, str)


class _Reader:
    """A cursor over the text; each method reads one construct."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def call(self) -> Call:
        self._space()
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self._error("a name")
        self.at = match.end()
        if not self._take("("):
            return Call(match.group())
        return self._arguments(match.group())

    def _arguments(self, name: str) -> Call:
        args: list[Value] = []
        options: dict[str, Value] = {}
        while not self._take(")"):
            if (args or options) and not self._take(","):
                raise self._error("',' or ')'")
            self._space()
            key = _KEY.match(self.text, self.at)
            if key is None:
                if options:
                    raise self._error("'key=value' (positional values come first)")
                args.append(self.value())
                continue
            name_of = key.group(1).replace("-", "_")
            if name_of in options:
                raise self._error(f"{key.group(1)!r} only once")
            self.at = key.end()
            options[name_of] = self.value()
        return Call(name, tuple(args), options)

    def value(self) -> Value:
        if self.depth == _MAX_DEPTH:
            raise self._error(f"at most {_MAX_DEPTH} levels of nesting")
        self.depth += 1
        try:
            return self._value()
        finally:
            self.depth -= 1

    def _value(self) -> Value:
        self._space()
        if self._peek() in ('"', "'"):
            return self._quoted()
        if self._take("["):
            return self._list()
        match = _BARE.match(self.text, self.at)
        if match is None:
            raise self._error("a value")
        word = match.group()
        after = self.text[match.end() : match.end() + 1]
        if after == "(" and _NAME.fullmatch(word):
            return str(self.call())
        self.at = match.end()
        return _scalar(word)

    def _list(self) -> list[Value]:
        items: list[Value] = []
        while not self._take("]"):
            if items and not self._take(","):
                raise self._error("',' or ']'")
            items.append(self.value())
        return items

    def _quoted(self) -> str:
        quote = self.text[self.at]
        self.at += 1
        out: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if char == quote:
                return "".join(out)
            if char == "\\" and self.at < len(self.text):
                char = self.text[self.at]
                self.at += 1
            out.append(char)
        raise self._error(f"a closing {quote}")

    def end(self) -> None:
        self._space()
        if self.at < len(self.text):
            raise self._error("the end")

    def _space(self) -> None:
        while self._peek().isspace():
            self.at += 1

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def _take(self, char: str) -> bool:
        self._space()
        if self._peek() != char:
            return False
        self.at += 1
        return True

    def _error(self, expected: str) -> ConfigError:
        found = repr(self._peek()) if self._peek() else "the end"
        return ConfigError(
            f"cannot read {self.text!r}: expected {expected}, found {found}",
            where=f"character {self.at + 1}",
            fix="write name, or name(value, option=value); quote text that has spaces or commas",
        )


def _scalar(word: str) -> Value:
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    for convert in (int, float):
        try:
            return convert(word)
        except ValueError:
            continue
    return word
