"""Which characters of a file does a node of its syntax tree stand on?

A script is edited by positions, so that its comments, quotes, line ends and encoding stay as they are. The
syntax tree counts columns in bytes of UTF-8 and lines as Python's tokenizer does; everything here counts
characters of the text.
"""

from __future__ import annotations

import ast
import codecs
import io
import re
import tokenize
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from echelon.errors import ConfigError

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|\Z)")
_BLANK = re.compile(r"[ \t\f]*")
_REST = re.compile(r"[ \t\f]*(?:#[^\r\n]*)?(?:\r\n|\r|\n|\Z)")


@dataclass(frozen=True)
class ScriptText:
    """The text of a script without a byte order mark, and how it is written to disk."""

    text: str
    encoding: str = "utf-8"
    mark: bool = False

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> ScriptText:
        """Read a file's bytes as Python would; an encoding that does not fit is a ConfigError."""
        try:
            declared, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            mark = data.startswith(codecs.BOM_UTF8)
            encoding = "utf-8" if declared == "utf-8-sig" else declared
            return cls(data[3 * mark :].decode(encoding), encoding, mark)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ConfigError(
                "the file is not text in UTF-8, nor in an encoding that it declares",
                where=where,
                fix="save it as UTF-8, or declare its encoding in the first line: # coding: latin-1",
            ) from error

    def encode(self, text: str) -> bytes:
        """The bytes of a changed text, as this one was written."""
        return codecs.BOM_UTF8 * self.mark + text.encode(self.encoding)

    @cached_property
    def lines(self) -> list[str]:
        """The lines with their ends."""
        return [line for line in _LINE.findall(self.text) if line]

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; a SyntaxError if the text is not Python."""
        return ast.parse(self.text)

    @cached_property
    def comments(self) -> set[int]:
        """The lines that hold nothing but a comment."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        found = {one.start[0] for one in tokens if one.type == tokenize.COMMENT}
        return {line for line in found if self.lines[line - 1].lstrip().startswith("#")}

    @cached_property
    def newline(self) -> str:
        """The end of the script's lines."""
        match = re.search(r"\r\n|\r|\n", self.text)
        return match.group() if match else "\n"

    @cached_property
    def indent(self) -> str:
        """One level of indentation: that of the first indented block."""
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if isinstance(node, ast.stmt) and isinstance(body, list) and body:
                outer, inner = self.indentation(node), self.indentation(body[0])
                if inner.startswith(outer) and len(inner) > len(outer) and body[0].lineno > node.lineno:
                    return inner[len(outer) :]
        return "    "

    def offset(self, line: int, column: int) -> int:
        """The character at a position of the syntax tree: lines from 1, columns in bytes of UTF-8."""
        if line > len(self.lines):
            return len(self.text)
        text = self.lines[line - 1]
        return self._starts[line - 1] + len(text.encode()[:column].decode(errors="ignore"))

    def line_at(self, offset: int) -> int:
        """The line, from 1, of a character."""
        return bisect_right(self._starts, offset) if offset < len(self.text) else len(self.lines)

    def line_start(self, line: int) -> int:
        """The first character of a line; that of the line after the last is the end of the text."""
        return self._starts[min(line - 1, len(self.lines))]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The characters of an expression or a statement, without its decorators."""
        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword, ast.arg, ast.alias))
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.offset(node.lineno, node.col_offset)
        return start, self.offset(node.end_lineno, node.end_col_offset)

    def of(self, node: ast.AST) -> str:
        """The source of a node."""
        start, stop = self.span(node)
        return self.text[start:stop]

    def trusted(self, node: ast.expr) -> bool:
        """Whether the node's position is that of its source; inside f-strings of Python 3.11 it is not."""
        try:
            again = ast.parse(f"({self.of(node)})", mode="eval").body
        except (SyntaxError, ValueError):
            return False
        return ast.dump(again).replace("Store()", "Load()") == ast.dump(node).replace("Store()", "Load()")

    def first_line(self, statement: ast.stmt) -> int:
        """The line on which a statement begins, with its decorators."""
        decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
        return min([statement.lineno, *(one.lineno for one in decorators)])

    def indentation(self, statement: ast.stmt) -> str:
        """The white space before a statement."""
        match = _BLANK.match(self.lines[self.first_line(statement) - 1])
        assert match is not None
        return match.group()

    def alone(self, statement: ast.stmt) -> bool:
        """Whether no other code stands on the statement's lines."""
        first = self.first_line(statement)
        before = self.lines[first - 1].encode()
        if first == statement.lineno:
            before = before[: statement.col_offset]
        else:
            before = before[: len(self.indentation(statement).encode())]
        return not before.strip() and _REST.match(self.text, self.span(statement)[1]) is not None
