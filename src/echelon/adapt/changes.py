"""How do changes of single nodes become one new text?

A change names a node of the syntax tree, never a position, so that rules need not know each other. Changes
that do not touch each other compose: a statement can move into a new `if` while an expression inside it is
replaced.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from echelon.adapt.text import ScriptText


@dataclass(frozen=True, slots=True)
class Replace:
    """Put other text in the place of an expression, an argument, or a whole statement."""

    node: ast.AST
    text: str


@dataclass(frozen=True, slots=True)
class Cut:
    """Take an argument out of a call, with its comma."""

    call: ast.Call
    argument: ast.keyword


@dataclass(frozen=True, slots=True)
class Remove:
    """Take a statement out, with its lines."""

    statement: ast.stmt


@dataclass(frozen=True, slots=True)
class Insert:
    """Put a statement before or after another one, with the same indentation."""

    statement: ast.stmt
    text: str
    where: Literal["before", "after"]


@dataclass(frozen=True, slots=True)
class Enclose:
    """Put a statement under a header such as `if session.is_leader:`; without one, under that above it."""

    statement: ast.stmt
    header: str


Change = Replace | Cut | Remove | Insert | Enclose


@dataclass(frozen=True, slots=True)
class Splice:
    """Characters from `start` to `stop` become `text`; `turn` orders those at the same place."""

    start: int
    stop: int
    text: str
    turn: int = 0


class Impossible(Exception):
    """A change cannot be made by positions: other code is on the same line, or positions are not known."""


def splices(text: ScriptText, change: Change, emptied: Iterable[ast.stmt] = ()) -> list[Splice]:
    """What a change does to the text; raises Impossible. Statements in `emptied` become `pass`."""
    match change:
        case Replace(node, new):
            if isinstance(node, ast.expr) and not text.trusted(node):
                raise Impossible
            if isinstance(node, ast.stmt) and not text.alone(node):
                raise Impossible
            start, stop = text.span(node)
            return [Splice(start, stop, new)]
        case Cut(call, argument):
            return [_cut(text, call, argument)]
        case Remove(statement):
            _alone(text, statement)
            if statement in emptied:
                start, stop = text.span(statement)
                return [Splice(start, stop, "pass")]
            assert statement.end_lineno is not None
            first = text.line_start(text.first_line(statement))
            return [Splice(first, text.line_start(statement.end_lineno + 1), "")]
        case Insert(statement, new, where):
            return [_insert(text, statement, new, where)]
        case Enclose(statement, header):
            return _enclose(text, statement, header)


def _alone(text: ScriptText, statement: ast.stmt) -> None:
    if not text.alone(statement):
        raise Impossible


def _cut(text: ScriptText, call: ast.Call, argument: ast.keyword) -> Splice:
    """The argument from the end of the one before it, or to the start of the one after it."""
    if not text.trusted(call):
        raise Impossible
    others = sorted([*call.args, *call.keywords], key=lambda one: text.span(one)[0])
    at = others.index(argument)
    start, stop = text.span(argument)
    if at:
        start = text.span(others[at - 1])[1]
    elif len(others) > 1:
        stop = text.span(others[1])[0]
    between = text.text[start : text.span(argument)[0]] + text.text[text.span(argument)[1] : stop]
    if "#" in between or between.strip(" \t\r\n,\\"):  # a comment, or brackets around an argument
        raise Impossible
    return Splice(start, stop, "")


def _insert(text: ScriptText, statement: ast.stmt, new: str, where: str) -> Splice:
    if text.lines[text.first_line(statement) - 1][: len(text.indentation(statement))].strip():
        raise Impossible
    _alone(text, statement)
    indent, end = text.indentation(statement), text.newline
    lines = "".join(f"{indent}{line}{end}" if line else end for line in new.split("\n"))
    if where == "before":
        first = text.first_line(statement)
        while first - 1 in text.comments:  # comments above a statement stay with it
            first -= 1
        at = text.line_start(first)
        return Splice(at, at, lines, turn=1)
    assert statement.end_lineno is not None
    at = text.line_start(statement.end_lineno + 1)
    if at == len(text.text) and not text.lines[-1].endswith(("\n", "\r")):
        lines = end + lines[: -len(end)]
    return Splice(at, at, lines, turn=-len(indent))  # what belongs to an inner block comes first


def _enclose(text: ScriptText, statement: ast.stmt, header: str) -> list[Splice]:
    _alone(text, statement)
    for node in ast.walk(statement):  # a text over several lines would get the indentation too
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno != node.lineno:
            raise Impossible
    first = text.first_line(statement)
    at = text.line_start(first)
    head = (
        [Splice(at, at, f"{text.indentation(statement)}{header}{text.newline}", turn=2)] if header else []
    )
    assert statement.end_lineno is not None
    starts = [text.line_start(line) for line in range(first, statement.end_lineno + 1)]
    filled = [start for start in starts if text.text[start : start + 1] not in ("", "\r", "\n")]
    return [*head, *(Splice(start, start, text.indent, turn=3) for start in filled)]


class Changes:
    """Collects changes that can be made together."""

    def __init__(self, text: ScriptText) -> None:
        self._text = text
        self._made: list[Change] = []
        self._splices: list[Splice] = []

    def add(self, changes: Sequence[Change]) -> bool:
        """Take all of these changes, or none; False if one cannot be made, alone or with the others."""
        try:
            new = [splice for change in changes for splice in splices(self._text, change)]
        except Impossible:
            return False
        if any(_collide(one, other) for one in new for other in self._splices):
            return False
        self._made += changes
        self._splices += new
        return True

    @property
    def made(self) -> list[Change]:
        """The changes that were taken."""
        return list(self._made)

    def text(self) -> str:
        """The new text."""
        made = _without_empty_ifs(self._text, self._made)
        emptied = [block[0] for _, block in _emptied(self._text, made)]
        parts = [splice for change in made for splice in splices(self._text, change, emptied)]
        out, at = [], 0
        for splice in sorted(parts, key=lambda one: (one.start, one.stop > one.start, one.turn)):
            if splice.start < at:  # inside something that was replaced or removed
                continue
            out += [self._text.text[at : splice.start], splice.text]
            at = splice.stop
        return "".join([*out, self._text.text[at:]])


def _collide(one: Splice, other: Splice) -> bool:
    """Whether two splices change the same characters; one that only adds may stand at any edge."""
    if one.start == one.stop or other.start == other.stop:
        point, whole = (one, other) if one.start == one.stop else (other, one)
        # Indentation inside something that is replaced is left out, see `Changes.text`.
        return whole.start < point.start < whole.stop and point.turn < 2
    if not one.text or not other.text:  # whatever is inside a removed statement goes with it
        gone, inner = (one, other) if not one.text else (other, one)
        if gone.start <= inner.start and inner.stop <= gone.stop:
            return False
    return one.start < other.stop and other.start < one.stop


def _without_empty_ifs(text: ScriptText, changes: Sequence[Change]) -> list[Change]:
    """The changes, and the removal of each `if` whose only block is removed and whose test calls nothing.

    A call in the test may do something; then the block becomes `pass`.
    """
    made = list(changes)
    while True:
        found = [
            owner
            for owner, _ in _emptied(text, made)
            if isinstance(owner, ast.If)
            and not owner.orelse
            and not any(isinstance(one, (ast.Call, ast.NamedExpr)) for one in ast.walk(owner.test))
            and text.alone(owner)
        ]
        inside = {one for owner in found for one in ast.walk(owner)}
        new: list[Change] = [Remove(owner) for owner in found if Remove(owner) not in made]
        if not new:
            return made
        made = [one for one in made if not (isinstance(one, Remove) and one.statement in inside)] + new


def _emptied(text: ScriptText, changes: Sequence[Change]) -> Iterator[tuple[ast.AST, list[ast.stmt]]]:
    """The blocks of which all statements are removed, with the statements that they belong to."""
    removed = [change.statement for change in changes if isinstance(change, Remove)]
    anchors = [change.statement for change in changes if isinstance(change, Insert)]
    for node in ast.walk(text.tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if not isinstance(block, list) or not block or isinstance(node, ast.Module) or node in removed:
                continue
            if all(one in removed for one in block) and not any(one in anchors for one in block):
                yield node, block
