"""Sections, tables and legends as HTML text; text from outside is escaped."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def safe(text: str) -> str:
    """Text from outside, escaped for HTML text and for quoted attributes."""
    return escape(_CONTROL.sub("", text), quote=True)


def section(title: str, body: str) -> str:
    """A framed part of the page; `body` is HTML."""
    return f"<section><h2>{safe(title)}</h2>{body}</section>"


def about(text: str) -> str:
    """A small remark on how to read a chart or table."""
    return f'<p class="about">{safe(text)}</p>'


def figure(svg: str, title: str = "") -> str:
    """A chart, with a small heading if it has a title."""
    heading = f"<h3>{safe(title)}</h3>" if title else ""
    return f"{heading}<figure>{svg}</figure>"


def legend(entries: Mapping[str, str]) -> str:
    """What each colour (a CSS class) means."""
    items = "".join(
        f'<li><span class="swatch {look}"></span>{safe(name)}</li>' for look, name in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[int] = (),
    wide: int | None = None,
) -> str:
    """A table of right-aligned figures; columns in `words` are left-aligned, column `wide` may wrap."""

    def look(column: int) -> str:
        if column == wide:
            return ' class="words wide"'
        return ' class="words"' if column in words else ""

    def row(tag: str, cells: Sequence[str]) -> str:
        return "".join(f"<{tag}{look(at)}>{safe(cell)}</{tag}>" for at, cell in enumerate(cells))

    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{row("th", head)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
