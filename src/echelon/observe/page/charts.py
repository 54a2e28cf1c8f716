"""Line, bar and Gantt charts as SVG text.

Colours are CSS classes, so one drawing serves light, dark and print. Text from outside is escaped.
The attributes `data-hover` and `data-tip` have the tooltips.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.observe.page.markup import safe
from echelon.observe.page.scale import Axis, Point

_CHAR_PX = 6.6  # about the width of a character at the charts' font size
_WIDTH = 918
_LEFT_PX = 54  # the same for all curves, so that charts below each other line up
_ROW_PX = 26
_BAR_PX = 16
_UNDER_PX = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve: `look` is its CSS class, `tips` the tooltip of each point, if any."""

    look: str
    points: Sequence[Point]
    tips: Sequence[str] = ()
    dots: bool = False
    area: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A vertical line at a moment, with a text."""

    at: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One row: a label, segments, a note at the end, and a thin line of segments `under` the bar."""

    label: str
    segments: Sequence[Segment]
    note: str = ""
    under: Sequence[Segment] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A rectangle from `begin` to `end` on the value axis, and from `low` to `high` of the bar's height."""

    begin: float
    end: float
    look: str
    tip: str
    text: str = ""
    low: float = 0.0
    high: float = 1.0


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    label: str,
    marks: Sequence[Mark] = (),
    width: int = _WIDTH,
    height: int = 250,
) -> str:
    """Curves over a common x axis."""
    shown = [mark for mark in marks if x.low <= mark.at <= x.high]
    left, right = max(_LEFT_PX, 14 + _widest(y.labels)), width - 14
    top, bottom = (42 if shown else 26), height - 38
    parts = [_y_axis(y, left, right, top, bottom), _x_axis(x, left, right, bottom)]
    parts += _marks(shown, x, left, right, top, bottom)
    hover = []
    for one in series:
        placed = [(x.place(px, left, right), y.place(py, bottom, top)) for px, py in one.points]
        parts += _curve(one, placed, bottom)
        if one.tips:
            tipped = zip(placed, one.tips, strict=True)
            points = [[round(px, 1), round(py, 1), tip] for (px, py), tip in tipped]
            hover.append({"look": one.look, "points": points})
    attribute = f' data-hover="{safe(json.dumps(hover, ensure_ascii=False))}"' if hover else ""
    return svg(parts, width, height, label, attribute)


def row_chart(
    bars: Sequence[Bar], x: Axis, *, label: str, uprights: Sequence[float] = (), width: int = _WIDTH
) -> str:
    """Horizontal bars, one row each, over a common axis; `uprights` are dotted lines through all rows."""
    labels = [shortened(bar.label, 34) for bar in bars]
    left = 16 + _widest(labels)
    right = width - 14 - (_widest([bar.note for bar in bars]) + 8 if any(bar.note for bar in bars) else 0)
    top, bottom = 8, 12 + _ROW_PX * len(bars)
    parts = [_x_axis(x, left, right, bottom, grid_from=top)]
    for row, (bar, name) in enumerate(zip(bars, labels, strict=True)):
        y = top + _ROW_PX * row + (_ROW_PX - _BAR_PX) / 2
        text_y = y + _BAR_PX / 2
        parts.append(svg_text(left - 8, text_y, name, "label", anchor="end", middle=True, tip=bar.label))
        lanes = ((bar.segments, y, _BAR_PX), (bar.under, y + _BAR_PX + 1, _UNDER_PX))
        for pieces, lane_y, height in lanes:
            for piece in pieces:
                begin, end = x.place(piece.begin, left, right), x.place(piece.end, left, right)
                parts.append(_segment(piece, begin, end, lane_y, height))
        if bar.note:
            parts.append(svg_text(right + 10, text_y, bar.note, "note", middle=True))
    for at in uprights:
        px = x.place(at, left, right)
        parts.append(f'<line class="upright" x1="{px:.1f}" x2="{px:.1f}" y1="{top}" y2="{bottom}"/>')
    return svg(parts, width, bottom + 40, label)


def _segment(piece: Segment, begin: float, end: float, y: float, height: float) -> str:
    if end <= begin:
        return ""
    # Keep very short segments visible.
    width = max(end - begin, 0.7)
    y, height = y + height * (1 - piece.high), height * (piece.high - piece.low)
    drawn = (
        f'<rect class="fill {piece.look}" x="{begin:.1f}" y="{y:.1f}" width="{width:.1f}" '
        f'height="{height:.4g}" data-tip="{safe(piece.tip)}"/>'
    )
    if piece.text and width > len(piece.text) * _CHAR_PX + 8:
        inside = f"inside on-{piece.look}"
        drawn += svg_text(
            (begin + end) / 2, y + height / 2, piece.text, inside, anchor="middle", middle=True
        )
    return drawn


def _curve(one: Series, placed: Sequence[Point], bottom: float) -> list[str]:
    if not placed:
        return []
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in placed)
    parts = []
    if one.area and len(placed) > 1:
        closed = f"{placed[0][0]:.1f},{bottom:.1f} {path} {placed[-1][0]:.1f},{bottom:.1f}"
        parts.append(f'<polygon class="area {one.look}" points="{closed}"/>')
    if len(placed) > 1:
        parts.append(f'<polyline class="line {one.look}" points="{path}"/>')
    if one.dots or len(placed) == 1:
        parts += [
            f'<circle class="dot {one.look}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>' for px, py in placed
        ]
    return parts


def _marks(
    marks: Sequence[Mark], x: Axis, left: float, right: float, top: float, bottom: float
) -> list[str]:
    parts = []
    free_from = left
    for mark in sorted(marks, key=lambda mark: mark.at):
        px = x.place(mark.at, left, right)
        tip = safe(mark.text)
        line = f'<line class="mark" x1="{px:.1f}" x2="{px:.1f}" y1="{top - 6}" y2="{bottom}"'
        parts.append(f'{line} data-tip="{tip}"/>')
        text = shortened(mark.text)
        begin = min(max(left, px - len(text) * _CHAR_PX / 2), right - len(text) * _CHAR_PX)
        if begin >= free_from:  # otherwise it would overlap the text before; the tooltip still has it
            parts.append(svg_text(begin, top - 10, text, "note"))
            free_from = begin + (len(text) + 2) * _CHAR_PX
    return parts


def _x_axis(x: Axis, left: float, right: float, bottom: float, grid_from: float | None = None) -> str:
    parts = [f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{bottom}" y2="{bottom}"/>']
    free_from = -1e9
    for tick, text in zip(x.ticks, x.labels, strict=True):
        px = x.place(tick, left, right)
        if grid_from is not None:
            parts.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{grid_from}" y2="{bottom}"/>')
        parts.append(f'<line class="axis" x1="{px:.1f}" x2="{px:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        half = len(text) * _CHAR_PX / 2
        if px - half >= free_from:
            parts.append(svg_text(px, bottom + 17, text, "tick", anchor="middle"))
            free_from = px + half + 6
    parts.append(svg_text((left + right) / 2, bottom + 33, x.title, "title", anchor="middle"))
    return "".join(parts)


def _y_axis(y: Axis, left: float, right: float, top: float, bottom: float) -> str:
    parts = [svg_text(2, 12, y.title, "title")]
    for tick, text in zip(y.ticks, y.labels, strict=True):
        py = y.place(tick, bottom, top)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(svg_text(left - 7, py, text, "tick", anchor="end", middle=True))
    return "".join(parts)


def svg_text(
    x: float,
    y: float,
    text: str,
    look: str,
    *,
    anchor: str = "start",
    middle: bool = False,
    tip: str = "",
) -> str:
    """A text at a place, with a tooltip if it says more."""
    shift = ' dy="0.35em"' if middle else ""
    hover = f' data-tip="{safe(tip)}"' if tip and tip != text else ""
    return (
        f'<text class="{look}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{shift}{hover}>'
        f"{safe(text)}</text>"
    )


def svg(parts: Sequence[str], width: int, height: int, label: str, attribute: str = "") -> str:
    """A whole drawing."""
    size = f'viewBox="0 0 {width} {height}" width="{width}"'
    return f'<svg {size} role="img" aria-label="{safe(label)}"{attribute}>{"".join(parts)}</svg>'


def _widest(texts: Sequence[str]) -> float:
    return max((len(text) for text in texts), default=0) * _CHAR_PX


def shortened(text: str, most: int = 26) -> str:
    """The text, or its begin if it is too long."""
    return text if len(text) <= most else text[: most - 1] + "…"
