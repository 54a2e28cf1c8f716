"""Writes one self-contained HTML page about a run: its results, its speed, and who kept the others waiting.

Style, tooltip and charts are in the file; it loads nothing from a network. Everything shown comes from
events, except the configuration and the plan, which are copied from the run's folder. If a run is still
going on or ended early, the page shows what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from echelon.config.units import show_seconds
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.observe.damage import damage_of
from echelon.observe.events import LAUNCHER, BucketReduced, StepEnded
from echelon.observe.follow import read_run
from echelon.observe.membership import members_line
from echelon.observe.page.decided import decided
from echelon.observe.page.history import Incident, RunHistory, collect_history, middle_steps, middle_window
from echelon.observe.page.markup import about, safe, section, table
from echelon.observe.page.planned import planned
from echelon.observe.page.sections import close_up, communication, learning, speed, time_split, waiting
from echelon.observe.page.stages import stages_section
from echelon.observe.page.sync import synchronisation
from echelon.observe.plan_view import PlanView, view_of
from echelon.observe.run_folder import RunFolder
from echelon.observe.spans import end_of
from echelon.observe.summary import Summary
from echelon.observe.sync import plan_values, policy_of
from echelon.observe.verified import verify_line

_MOST_INCIDENTS = 200
_OUTCOMES = ("completed", "failed", "interrupted")


def write_report(folder: RunFolder, out: Path) -> Path:
    """Write the run's page; raises ConfigError if the run has no events."""
    history = collect_history(read_run(folder), policy_of(folder))
    if history.began is None:
        raise ConfigError(
            "the run has no events yet",
            where=str(folder.events),
            fix="wait until the run has begun, or read its log files in logs/",
        )
    sample = _sample(folder, history)
    quoted = {"Configuration": _quote(folder.config), "Plan": _quote(folder.plan)}
    view = view_of(plan_values(folder))
    page = page_html(history, sample, title=folder.name, quoted=quoted, plan=view, damage=damage_of(folder))
    write_whole(out, page.encode("utf-8"))
    return out


def _sample(folder: RunFolder, history: RunHistory) -> list[StepEnded | BucketReduced]:
    """A few steps to draw one by one; a long run is read twice instead of being kept in memory."""
    events = (e for e in read_run(folder) if isinstance(e, (StepEnded, BucketReduced)))
    if history.together:
        wanted = set(middle_steps(history.rounds))
        return [event for event in events if event.step in wanted]
    if not history.rounds:
        return []
    begin, end = (history.first_step + at_s for at_s in middle_window(history.rounds))
    return [e for e in events if isinstance(e, StepEnded) and e.start < end and end_of(e) > begin]


def _quote(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def page_html(
    history: RunHistory,
    sample: Sequence[StepEnded | BucketReduced],
    *,
    title: str,
    quoted: Mapping[str, str],
    plan: PlanView | None = None,
    damage: Sequence[str] = (),
) -> str:
    """The whole page; `sample` has the steps to draw one by one, `quoted` the files to show verbatim."""
    steps = [event for event in sample if isinstance(event, StepEnded)]
    buckets = [event for event in sample if isinstance(event, BucketReduced)]
    parts = [_header(history, title), _damaged(damage), _tiles(history.summary)]
    if history.summary.steps:
        parts += [
            waiting(history) if history.together else synchronisation(history),
            learning(history),
            speed(history),
            time_split(history.summary),
        ]
        parts.append(stages_section(history.summary.stages))
        parts += [communication(history.summary), close_up(steps, history.summary, buckets)]
    else:
        parts.append(section("No steps", "<p>No step was recorded, so there is nothing to draw.</p>"))
    parts.append(planned(plan, history) if plan is not None else "")
    parts += [_members(history.summary), _verified(history.summary)]
    parts.append(decided(history.summary.decisions))
    parts += [_incidents(history.incidents), _logged(history), _appendix(quoted)]
    return _document(title, "".join(parts))


def _document(title: str, body: str) -> str:
    files = resources.files("echelon.observe.page")
    style = files.joinpath("style.css").read_text(encoding="utf-8")
    script = files.joinpath("hover.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title>\n<style>\n{style}</style></head>\n"
        f'<body><main>{body}</main>\n<div id="tip" hidden></div>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def _header(history: RunHistory, title: str) -> str:
    summary = history.summary
    began = datetime.fromtimestamp(history.began or 0.0, tz=UTC)
    command = f" · <code>{safe(history.command)}</code>" if history.command else ""
    look = summary.outcome if summary.outcome in _OUTCOMES else "unfinished"
    failure = f'<section class="failure">{safe(summary.failure)}</section>' if summary.failure else ""
    return (
        f'<header><h1>{safe(title)}<span class="badge {look}">{safe(summary.outcome)}</span></h1>'
        f'<p class="muted">began {began:%Y-%m-%d %H:%M:%S} UTC{command}</p></header>{failure}'
    )


def _damaged(damage: Sequence[str]) -> str:
    if not damage:
        return ""
    text = f"The record is damaged: {'; '.join(damage)}. Figures on this page are of what is left."
    return f'<section class="failure">{safe(text)}</section>'


def _verified(summary: Summary) -> str:
    if summary.verified is None:
        return ""
    return section("Checks", f'<p class="verdict">{safe(verify_line(summary.verified))}</p>')


def _members(summary: Summary) -> str:
    if summary.members is None:
        return ""
    return section("Members", f'<p class="verdict">{safe(members_line(summary.members))}</p>')


def _tiles(summary: Summary) -> str:
    tiles = {
        "workers": f"{summary.world_size}",
        "steps": f"{summary.steps if summary.sync is None else summary.all_steps:,}",
        "updates": f"{summary.sync.updates:,}" if summary.sync and summary.sync.served else "",
        "epochs": f"{summary.epochs:,}" if summary.epochs else "",
        "from first to last step": show_seconds(summary.seconds),
        "samples/s": f"{summary.samples_per_s:,.0f}" if summary.samples else "",
        "train loss": f"{summary.train_loss:.3g}" if summary.train_loss is not None else "",
        "test loss": f"{summary.test_loss:.3g}" if summary.test_loss is not None else "",
        "test accuracy": f"{100 * summary.accuracy:.1f} %" if summary.accuracy is not None else "",
    }
    body = "".join(
        f'<div class="tile"><b>{safe(value)}</b><span>{name}</span></div>'
        for name, value in tiles.items()
        if value
    )
    return f'<div class="tiles">{body}</div>'


def _incidents(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return ""
    shown = sorted(incidents, key=lambda i: i.kind == "note")[:_MOST_INCIDENTS]
    rows = [
        [_when(i.at_s), i.kind, "launcher" if i.rank == LAUNCHER else f"rank {i.rank}", i.text]
        for i in sorted(shown, key=lambda i: i.at_s)
    ]
    body = table(["when", "kind", "reported by", "what"], rows, words={1, 2}, wide=3)
    body = about("Times are counted from the first step.") + body
    if len(incidents) > _MOST_INCIDENTS:
        body += about(f"and {len(incidents) - _MOST_INCIDENTS:,} more")
    return section("What happened", body)


def _when(at_s: float) -> str:
    return show_seconds(at_s) if at_s >= 0 else f"{show_seconds(-at_s)} before"


def _logged(history: RunHistory) -> str:
    if not history.logged:
        return ""
    rows = [
        [name, f"{value.times:,}", f"{value.last:.5g}", f"{value.least:.5g}", f"{value.most:.5g}"]
        for name, value in sorted(history.logged.items())
    ]
    return section(
        "Logged by the script", table(["name", "times", "last", "least", "most"], rows, words={0})
    )


def _appendix(quoted: Mapping[str, str]) -> str:
    body = "".join(
        f"<details><summary>{safe(name)}</summary><pre>{safe(text)}</pre></details>"
        for name, text in quoted.items()
        if text
    )
    return f"<section>{body}</section>" if body else ""
