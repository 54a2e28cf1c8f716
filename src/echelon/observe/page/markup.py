"""Sections, tables and legends as HTML text; all that came from outside is escaped on the way."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def safe(text: str) -> str:
    """Text from outside, fit for HTML text and for quoted attributes."""
    return escape(_CONTROL.sub("", text), quote=True)


def section(title: str, body: str) -> str:
    """A framed part of the page; `body` is HTML already."""
    return f"<section><h2>{safe(title)}</h2>{body}</section>"


def about(text: str) -> str:
    """A small remark on how to read what follows."""
    return f'<p class="about">{safe(text)}</p>'


def figure(svg: str, title: str = "") -> str:
    """A chart, under its own small heading if it has one."""
    heading = f"<h3>{safe(title)}</h3>" if title else ""
    return f"{heading}<figure>{svg}</figure>"


def legend(entries: Mapping[str, str]) -> str:
    """Which colour (a CSS class) means what."""
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
    """Figures to the right, the columns in `words` to the left; column `wide` may break its lines."""

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
