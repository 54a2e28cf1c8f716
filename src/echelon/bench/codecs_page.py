"""Writes one self-contained HTML page about codecs: bytes saved against loss, curves, and figures.

It uses the styles of a simulation's page (`simulate/page.py`) and needs no network. The axis of bytes saved
is logarithmic. Losses far above the exact one's are drawn at the top, so that a codec that diverges does
not hide the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.bench.codecs import Bench, Comparison, Trial, in_words, show_times
from echelon.config.units import show_bytes, show_seconds
from echelon.observe.page.charts import Series, line_chart
from echelon.observe.page.markup import about, figure, legend, safe, section, table
from echelon.observe.page.scale import Axis, Point, count_axis, value_axis
from echelon.simulate.page import document, look_of

HEAD = ("codec", "smaller", "bytes per step", "coding", "predicted step", "loss", "difference")
_UNKNOWN = "-"
_WIDTH, _HEIGHT = 918, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 760, 28, 340
_CHAR_PX, _LINE_PX, _DOT_PX = 6.6, 14, 5
_BEYOND = 1.3  # times the exact one's loss: larger losses are drawn at the top
Taken = tuple[float, float, float]  # a label's left edge, its height on the page, its width


def codecs_html(found: Comparison, *, command: str = "") -> str:
    """The whole page."""
    bench = found.bench
    title = f"Codecs: {bench.model} on {bench.data}, {bench.workers} emulated workers"
    shown = f" · <code>{safe(command)}</code>" if command else ""
    said = "".join(f"<li>{safe(sentence)}</li>" for sentence in in_words(found))
    parts = [
        f"<header><h1>{safe(title)}</h1>"
        f'<p class="muted">{bench.steps} steps, {_seeds(bench)}{shown}</p></header>',
        section("Findings", f'<ul class="says verdict">{said}</ul>'),
        _saved(found),
        _learning(found),
        _figures(found),
        _setting(found),
    ]
    return document(title, "".join(parts))


def _seeds(bench: Bench) -> str:
    if bench.seeds == 1:
        return f"seed {bench.seed}"
    return f"seeds {bench.seed} to {bench.seed + bench.seeds - 1}"


def rows_of(found: Comparison) -> list[list[str]]:
    """The rows of the table with the columns `HEAD`, one for each codec."""
    return [
        [
            one.codec,
            show_times(found.smaller(one)),
            show_bytes(one.sent_bytes),
            show_seconds(one.coding_s),
            show_seconds(found.step_s(one)),
            f"stopped at {one.broke_at}" if one.broke_at is not None else _number(one.loss),
            "" if one is found.trials[0] else _differs(found, one),
        ]
        for one in found.trials
    ]


def show_worse(worse: float | None) -> str:
    """A difference of losses in percent, with its sign."""
    if worse is None:
        return _UNKNOWN
    percent = round(100 * worse, 1) + 0.0  # no -0.0
    return f"{percent:{'+' if percent else ''}.1f} %"


def _differs(found: Comparison, one: Trial) -> str:
    """The relative difference of its loss, with its range over several seeds."""
    spread = found.spread(one)
    shown = show_worse(found.worse(one))
    if spread is None:
        return shown
    least, most = (show_worse(end).removesuffix(" %") for end in spread)
    return f"{shown} ({least} to {most})"


def _number(loss: float | None) -> str:
    return _UNKNOWN if loss is None else f"{loss:.4f}"


# Bytes saved against loss


def _saved(found: Comparison) -> str:
    """A dot for each codec that reached the end, labelled with its name and its predicted step."""
    ended = [one for one in found.trials if one.loss is not None and math.isfinite(found.smaller(one))]
    if not ended:
        return ""
    top = _BEYOND * (found.trials[0].loss or max(one.loss or 0.0 for one in ended))
    losses = [min(one.loss or 0.0, top) for one in ended]
    x = times_axis([found.smaller(one) for one in ended], "times fewer bytes sent than float32")
    y = _loss_axis(losses)
    places = {
        one.codec: (
            x.place(math.log10(found.smaller(one)), _LEFT, _RIGHT),
            y.place(min(one.loss or 0.0, top), _BOTTOM, _TOP),
        )
        for one in ended
    }
    taken: list[Taken] = [(px - _DOT_PX, py, 2 * _DOT_PX) for px, py in places.values()]
    parts = [_axes(x, y)]
    for index, one in enumerate(found.trials):
        if one.codec in places:
            parts.append(_dot(found, one, look_of(index), places[one.codec], taken))
    drawn = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" '
        f'aria-label="Bytes saved against validation loss">{"".join(parts)}</svg>'
    )
    rate = show_bytes(found.bench.link_bytes_per_s)
    body = about(
        "Further right: fewer bytes. Further down: a lower final validation loss. The time beside a name "
        f"is the predicted step at {rate}/s: measured gradient and coding, plus the bytes at that rate."
    )
    beyond = [f"{one.codec} ({one.loss:.3g})" for one in ended if (one.loss or 0.0) > top]
    if beyond:
        body += about(f"{', '.join(beyond)} {'is' if len(beyond) == 1 else 'are'} off the chart.")
    return section("Bytes saved against loss", body + figure(drawn))


def times_axis(ratios: Sequence[float], title: str) -> Axis:
    """A logarithmic axis of powers of ten around all ratios; positions are logarithms."""
    logs = [math.log10(ratio) for ratio in ratios]
    low, high = math.floor(min(*logs, 0.0)), math.ceil(max(*logs, 1.0))
    ticks = tuple(float(power) for power in range(low, high + 1))
    labels = tuple(f"{10.0**tick:g}x" for tick in ticks)
    return Axis(low=low, high=high, ticks=ticks, labels=labels, title=title)


def _loss_axis(losses: Sequence[float]) -> Axis:
    """An axis that does not start at zero, because small differences matter."""
    low, high = min(losses), max(losses)
    margin = 0.1 * (high - low) or 0.05 * high or 1.0
    low, high = max(0.0, low - margin), high + margin
    ticks = tuple(low + (high - low) * index / 5 for index in range(6))
    labels = tuple(f"{tick:.3g}" for tick in ticks)
    return Axis(low=low, high=high, ticks=ticks, labels=labels, title="validation loss")


def _axes(x: Axis, y: Axis) -> str:
    parts = [
        f'<text class="title" x="2" y="12">{safe(y.title)}</text>',
        f'<line class="axis" x1="{_LEFT}" x2="{_RIGHT}" y1="{_BOTTOM}" y2="{_BOTTOM}"/>',
        f'<text class="title" x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 34}" text-anchor="middle">'
        f"{safe(x.title)}</text>",
    ]
    for tick, text in zip(x.ticks, x.labels, strict=True):
        px = x.place(tick, _LEFT, _RIGHT)
        parts.append(f'<line class="grid" x1="{px:.1f}" x2="{px:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
        parts.append(
            f'<text class="tick" x="{px:.1f}" y="{_BOTTOM + 17}" text-anchor="middle">{text}</text>'
        )
    for tick, text in zip(y.ticks, y.labels, strict=True):
        py = y.place(tick, _BOTTOM, _TOP)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 7}" y="{py:.1f}" text-anchor="end" dy="0.35em">{text}</text>'
        )
    return "".join(parts)


def _dot(found: Comparison, one: Trial, look: str, place: Point, taken: list[Taken]) -> str:
    px, py = place
    name = one.codec.partition("(")[0]
    text = f"{name}, {show_seconds(found.step_s(one))}"
    label_y = _free(px + 2 * _DOT_PX, py, len(text) * _CHAR_PX, taken)
    tip = (
        f"{one.codec}: {show_times(found.smaller(one))} fewer bytes, loss {_number(one.loss)}, coding "
        f"{show_seconds(one.coding_s)}, step {show_seconds(found.step_s(one))}"
    )
    lead = ""
    if abs(label_y - py) > _LINE_PX / 2:
        lead = f'<line class="axis" x1="{px:.1f}" x2="{px + 8:.1f}" y1="{py:.1f}" y2="{label_y:.1f}"/>'
    hover = f'data-tip="{safe(tip)}"'
    return (
        f'{lead}<circle class="dot {look}" cx="{px:.1f}" cy="{py:.1f}" r="{_DOT_PX}" {hover}/>'
        f'<text class="label" x="{px + 2 * _DOT_PX:.1f}" y="{label_y:.1f}" dy="0.35em" {hover}>'
        f"{safe(text)}</text>"
    )


def _free(px: float, py: float, width: float, taken: list[Taken]) -> float:
    """The height nearest to the dot's at which a label of that width overlaps no other."""
    heights = [py + shift * _LINE_PX / 2 for shift in sorted(range(-40, 41), key=abs)]
    beside = [y for at, y, other in taken if at < px + width and px < at + other]
    free = (
        y for y in heights if _TOP <= y <= _BOTTOM and all(abs(y - other) >= _LINE_PX for other in beside)
    )
    found = next(free, py)
    taken.append((px, found, width))
    return found


# Curves and figures


def _top(found: Comparison) -> float:
    """The largest loss that is drawn in its place; larger ones are drawn at the top."""
    return 1.2 * max(one.curve[0].loss for one in found.trials)


def _learning(found: Comparison) -> str:
    top = _top(found)
    lines = []
    for index, one in enumerate(found.trials):
        seen = [at for at in one.curve if math.isfinite(at.loss)]
        points: list[Point] = [(at.step, min(at.loss, top)) for at in seen]
        tips = [f"{one.codec} at step {at.step}: {at.loss:.4g}" for at in seen]
        lines.append(Series(look=look_of(index), points=points, tips=tips))
    lines = [line for line in lines if line.points]
    highest = max((y for line in lines for _, y in line.points), default=1.0)
    chart = line_chart(
        lines,
        count_axis(0, found.bench.steps, "step"),
        value_axis([highest], "loss"),
        label="Validation loss over steps",
    )
    names = legend({look_of(index): one.codec for index, one in enumerate(found.trials)})
    return section("Learning", names + figure(chart, "Validation loss"))


def _figures(found: Comparison) -> str:
    body = about(
        "Smaller: times fewer bytes than a ring of float32 numbers. Bytes per step: of the busiest worker. "
        "Coding: a worker's measured time for encoding and decoding. Predicted step: without overlap. "
        "Loss: of validation samples at the end. Difference: relative to the first codec's loss."
    )
    return section("Figures", body + table(HEAD, rows_of(found), words={0}))


def _setting(found: Comparison) -> str:
    bench = found.bench
    rows = [
        ("workers", f"{bench.workers}, batch {bench.batch} each", "given"),
        ("optimizer", f"sgd, learning rate {bench.lr:g}, momentum {bench.momentum:g}", "given"),
        ("gradient", show_bytes(found.gradient_bytes), "counted"),
        ("a gradient takes", f"{show_seconds(found.compute_s)}, one thread", "measured"),
        ("link", f"{show_bytes(bench.link_bytes_per_s)}/s, no latency", "given"),
        ("validation", f"{bench.test_samples or 'all'} samples", "given"),
    ]
    return section("Setting", table(["setting", "value", "source"], rows, words={0, 2}, wide=1))
