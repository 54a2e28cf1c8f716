"""Writes one self-contained HTML page about a simulation: findings, curves over virtual time, and figures.

It uses the charts and styles of a run's report (`observe/page/`) and needs no network. A line is the mean
over the seeds, a band their range. Losses far above the initial ones are drawn at the top, so that a policy
that diverges does not hide the others.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.page.charts import Series, line_chart
from echelon.observe.page.markup import about, figure, legend, safe, section, table
from echelon.observe.page.scale import Axis, Point, percent_axis, time_axis, value_axis
from echelon.simulate.compare import MetricFigures, Spread, Standing, in_words
from echelon.simulate.outcome import Metric, SimulationResult
from echelon.simulate.profile import Profile
from echelon.simulate.setting import Setting

_COLOURS = 8
_BEYOND = 3.0  # times the largest initial loss: larger losses are drawn at the top
_UNKNOWN = "-"
_CURVES: dict[Metric, tuple[str, str]] = {
    "train_loss": ("Train loss", "loss"),
    "test_loss": ("Test loss", "loss"),
    "test_accuracy": ("Test accuracy", "accuracy"),
}


def page_html(
    outcome: SimulationResult,
    standings: Sequence[Standing],
    *,
    command: str = "",
    sources: Mapping[str, str] | None = None,
    until_accuracy: float | None = None,
) -> str:
    """The whole page; `sources` tells for each part of the profile whether it was measured or given."""
    setting = outcome.setting
    title = f"{setting.model} on {setting.data}, {setting.workers} virtual workers"
    said = "".join(f"<li>{safe(sentence)}</li>" for sentence in in_words(outcome, standings))
    parts = [
        _header(setting, title, command),
        section("Findings", f'<ul class="says verdict">{said}</ul>'),
        _learning(outcome) if setting.gradients else "",
        _pace(outcome),
        _figures(setting, standings, until_accuracy),
        _conditions(setting, outcome.profile, sources or {}),
    ]
    return document(title, "".join(parts))


def document(title: str, body: str) -> str:
    """A self-contained HTML document."""
    shared, own = resources.files("echelon.observe.page"), resources.files("echelon.simulate")
    style = shared.joinpath("style.css").read_text(encoding="utf-8")
    style += own.joinpath("page.css").read_text(encoding="utf-8")
    script = shared.joinpath("hover.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title>\n<style>\n{style}</style></head>\n"
        f'<body><main>{body}</main>\n<div id="tip" hidden></div>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def _header(setting: Setting, title: str, command: str) -> str:
    shown = f" · <code>{safe(command)}</code>" if command else ""
    seeds = "one seed" if setting.seeds == 1 else f"{setting.seeds} seeds"
    return (
        f"<header><h1>{safe(title)}</h1>"
        f'<p class="muted">{setting.seconds:g} s of virtual time, {seeds}{shown}</p></header>'
    )


# Curves


def look_of(index: int) -> str:
    """The CSS classes of the policy with that index; when colours run out, lines are dashed."""
    return f"policy p{index % _COLOURS}" + (" dashed" if index >= _COLOURS else "")


def _legend(outcome: SimulationResult) -> str:
    return legend({look_of(index): policy for index, policy in enumerate(outcome.policies)})


def _learning(outcome: SimulationResult) -> str:
    body = about(
        "Lines are means over the seeds, bands reach from the smallest to the largest value."
        if outcome.setting.seeds > 1
        else "One seed."
    )
    body += _legend(outcome)
    for metric in _CURVES:
        body += _curves(outcome, metric)
    return section("Learning", body)


def _curves(outcome: SimulationResult, metric: Metric) -> str:
    title, unit = _CURVES[metric]
    bundles = [_bundle(outcome, policy, metric) for policy in outcome.policies]
    values = [value for bundle in bundles for _, found in bundle for value in found]
    if not values:
        return ""
    top = math.inf
    if metric != "test_accuracy":
        top = _BEYOND * max(value for bundle in bundles for _, found in bundle[:1] for value in found)
    axis = (
        percent_axis(values, unit)
        if metric == "test_accuracy"
        else value_axis([min(value, top) for value in values], unit)
    )
    chart = _chart(outcome, bundles, axis, title, percent=metric == "test_accuracy", top=top)
    return chart + (about(f"Losses above {top:.3g} are drawn at the top.") if max(values) > top else "")


Bundle = list[tuple[float, list[float]]]  # a time, and the values of all seeds


def _bundle(outcome: SimulationResult, policy: str, metric: Metric) -> Bundle:
    """A metric of all seeds over time, up to the first value that is not finite."""
    bundle: Bundle = []
    for points in zip(*(run.curve for run in outcome.of(policy)), strict=True):
        found = [getattr(point, metric) for point in points]
        if any(value is None or not math.isfinite(value) for value in found):
            break
        bundle.append((points[0].t, [float(value) for value in found]))
    return bundle


def _chart(
    outcome: SimulationResult,
    bundles: Sequence[Bundle],
    y: Axis,
    title: str,
    *,
    percent: bool = False,
    top: float = math.inf,
) -> str:
    bands, lines = [], []
    for index, (policy, bundle) in enumerate(zip(outcome.policies, bundles, strict=True)):
        if not bundle:
            continue
        if outcome.setting.seeds > 1 and len(bundle) > 1:
            bands.append(_band(bundle, look_of(index), top))
        lines.append(_line(bundle, look_of(index), policy, percent, top))
    x = time_axis(0.0, outcome.setting.seconds, "virtual time")
    return figure(line_chart([*bands, *lines], x, y, label=f"{title} over virtual time"), title)


def _band(bundle: Bundle, look: str, top: float) -> Series:
    """A closed curve along the largest values and back along the smallest; its area is the band."""
    there: list[Point] = [(t, min(max(found), top)) for t, found in bundle]
    back: list[Point] = [(t, min(min(found), top)) for t, found in reversed(bundle)]
    return Series(look=f"{look} band", points=[*there, *back], area=True)


def _line(bundle: Bundle, look: str, policy: str, percent: bool, top: float) -> Series:
    points: list[Point] = []
    tips = []
    for t, found in bundle:
        mean = statistics.fmean(found)
        points.append((t, min(mean, top)))
        shown = f"{100 * mean:.1f} %" if percent else f"{mean:.4g}"
        tips.append(f"{policy} at {t:.4g} s: {shown}")
    return Series(look=look, points=points, tips=tips)


def _pace(outcome: SimulationResult) -> str:
    """Gradients computed, and gradients per update."""
    made = [_bundle(outcome, policy, "gradients") for policy in outcome.policies]
    most = max(value for bundle in made for _, found in bundle for value in found)
    body = _legend(outcome)
    body += _chart(outcome, made, value_axis([most], "gradients"), "Gradients computed")
    per_update = [_per_update(outcome, policy) for policy in outcome.policies]
    values = [value for bundle in per_update for _, found in bundle for value in found]
    if values:
        title = "Gradients computed per update"
        body += _chart(outcome, per_update, value_axis(values, "gradients per update"), title)
        body += about(
            "Means between two evaluations, drawn at their middle: 1 if each gradient makes an update, the "
            "number of workers if all wait for each other, K if a buffer waits for K gradients."
        )
    return section("Gradients and updates", body)


def _per_update(outcome: SimulationResult, policy: str) -> Bundle:
    """Gradients per update over time, where every seed had an update."""
    runs = outcome.of(policy)
    bundle: Bundle = []
    for steps in zip(*(pairwise(run.curve) for run in runs), strict=True):
        updates = [later.updates - point.updates for point, later in steps]
        if all(updates):
            gradients = [later.gradients - point.gradients for point, later in steps]
            middle = (steps[0][0].t + steps[0][1].t) / 2
            bundle.append((middle, [g / u for g, u in zip(gradients, updates, strict=True)]))
    return bundle


# Figures


def _figures(setting: Setting, standings: Sequence[Standing], until_accuracy: float | None) -> str:
    body = ""
    if setting.gradients:
        body += about(
            f"Values at the end and averaged over the run. Difference: that average minus "
            f"{standings[0].policy}'s"
            + ("; ± is the standard deviation over the seeds." if setting.seeds > 1 else ".")
        )
        head = ["policy", "metric", "at the end", "on average", "difference"]
        body += table(
            head, [row for one in standings for row in _metric_rows(one, one is standings[0])], words={0, 1}
        )
    body += about(
        "Staleness: updates between reading weights and applying the gradient. Waiting: the part of the "
        "workers' time in which they did not compute."
    )
    head = ["policy", "gradients", "applied", "dropped", "updates", "staleness", "largest", "waiting"]
    rows = [
        [
            one.policy,
            f"{one.gradients:,.0f}",
            f"{one.applied:,.0f}",
            f"{one.dropped:,.0f}",
            f"{one.updates:,.0f}",
            f"{one.staleness_mean:.1f}",
            f"{one.staleness_max}",
            f"{100 * one.waiting_share:.0f} %",
        ]
        for one in standings
    ]
    if until_accuracy is not None:
        head.append(f"to {100 * until_accuracy:g} %")
        for row, one in zip(rows, standings, strict=True):
            row.append(show_reached(one, setting.seeds))
    body += table(head, rows, words={0})
    return section("Figures", body)


def _metric_rows(one: Standing, first: bool) -> list[list[str]]:
    kinds: list[tuple[str, MetricFigures, bool]] = [
        ("test accuracy %", one.test_accuracy, True),
        ("test loss", one.test_loss, False),
        ("train loss", one.train_loss, False),
    ]
    return [
        [
            one.policy if not index else "",
            name,
            show_spread(found.end, percent=percent),
            show_spread(found.average, percent=percent),
            "" if first else show_spread(found.difference, percent=percent, sign=True),
        ]
        for index, (name, found, percent) in enumerate(kinds)
    ]


def show_spread(spread: Spread, *, percent: bool = False, sign: bool = False) -> str:
    """A figure with its deviation, if any; fractions in percent, their differences in points."""
    if not math.isfinite(spread.mean):
        return _UNKNOWN
    scale, digits = (100, 1) if percent else (1, 3)
    mean = round(scale * spread.mean, digits) + 0.0  # no -0.0
    shown = f"{mean:{'+' if sign and mean else ''}.{digits}f}"
    return shown + (f" ± {scale * spread.deviation:.{digits}f}" if spread.deviation else "")


def show_reached(one: Standing, seeds: int) -> str:
    """When the accuracy was reached, and in how many seeds if not in all."""
    if one.reached_s is None:
        return "never"
    shown = f"{one.reached_s.mean:.3g} s"
    return shown if one.reached == seeds else f"{shown} ({one.reached} of {seeds})"


# Conditions


def profile_rows(
    setting: Setting, profile: Profile, sources: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """The durations of a profile, and whether they were measured or given."""
    costs, link = profile.costs, profile.link
    rates = sorted(set(setting.links)) or [link.bytes_per_s]
    shown = f"{show_bytes(rates[0])}/s" + (f" to {show_bytes(rates[-1])}/s" if len(rates) > 1 else "")
    served = ", ".join(
        f"{name} {show_seconds(cost)}"
        for name, cost in (("push", costs.queue_s), ("update", costs.apply_s), ("pull", costs.hand_s))
    )
    late = (f", jitter {setting.jitter}" if setting.jitter else "") + (
        f", loss {setting.loss:g}" if setting.loss else ""
    )
    return [
        ("a gradient", show_seconds(profile.compute_s), sources.get("compute", "")),
        ("the server", served, sources.get("costs", "")),
        ("a link", f"{shown}, latency {show_seconds(link.latency_s)}{late}", sources.get("link", "")),
    ]


def _conditions(setting: Setting, profile: Profile, sources: Mapping[str, str]) -> str:
    decay = f", weight decay {setting.weight_decay:g}" if setting.weight_decay else ""
    momentum = f", momentum {setting.momentum:g}" if setting.momentum else ""
    rows = [
        ("workers", f"{setting.workers}, batch {setting.batch} each", ""),
        ("optimizer", f"{setting.optimizer}, learning rate {setting.lr:g}{momentum}{decay}", ""),
        (
            "delay",
            f"{setting.delay}, {100 * setting.delayed:g} % of workers" if setting.delay else "none",
            "",
        ),
        ("speeds", ", ".join(f"{speed:g}" for speed in setting.speeds) or "all equal", ""),
        ("seeds", f"{setting.seeds} from {setting.seed} on", ""),
        *profile_rows(setting, profile, sources),
    ]
    if setting.groups:
        groups = "; ".join(",".join(map(str, group)) for group in setting.groups)
        rows.append(("groups", groups, ""))
    return section("Setting", table(["setting", "value", "source"], rows, words={0, 2}, wide=1))
