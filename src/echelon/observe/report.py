"""One self-contained HTML page about a run: what came out, how fast, and who kept the others waiting.

No network, nothing from elsewhere: style, tooltip and charts are in the file. All that is shown is
derived from events, except the configuration and the plan, which are quoted as they stand in the
run's folder. A run that is still going on, or ended early, gets the page of what there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from echelon.config.units import show_seconds
from echelon.errors import ConfigError
from echelon.observe.atomic import write_whole
from echelon.observe.events import LAUNCHER, BucketReduced, StepEnded
from echelon.observe.follow import read_run
from echelon.observe.page.markup import about, safe, section, table
from echelon.observe.page.sections import close_up, communication, learning, speed, time_split, waiting
from echelon.observe.page.story import Happening, Story, middle_steps, middle_window, tell
from echelon.observe.page.sync import agreed
from echelon.observe.run_folder import RunFolder
from echelon.observe.spans import end_of
from echelon.observe.summary import Summary
from echelon.observe.sync import firsts_of, policy_of

_MOST_HAPPENINGS = 200
_OUTCOMES = ("completed", "failed", "interrupted")


def write_report(folder: RunFolder, out: Path) -> Path:
    """Write the run's page; a run without any event has none."""
    story = tell(read_run(folder), policy_of(folder), firsts_of(folder))
    if story.began is None:
        raise ConfigError(
            "the run has no events yet",
            where=str(folder.events),
            fix="wait for the run to begin, or look at its logs/",
        )
    sample = _sample(folder, story)
    quoted = {"Configuration": _quote(folder.config), "Plan": _quote(folder.plan)}
    page = page_html(story, sample, title=folder.name, quoted=quoted)
    write_whole(out, page.encode("utf-8"))
    return out


def _sample(folder: RunFolder, story: Story) -> list[StepEnded | BucketReduced]:
    """A few steps to draw one by one; long runs are read twice rather than kept in memory."""
    events = (e for e in read_run(folder) if isinstance(e, (StepEnded, BucketReduced)))
    if story.together:
        wanted = set(middle_steps(story.rounds))
        return [event for event in events if event.step in wanted]
    if not story.rounds or story.began is None:
        return []
    begin, end = (story.began + at_s for at_s in middle_window(story.rounds))
    return [e for e in events if isinstance(e, StepEnded) and e.start < end and end_of(e) > begin]


def _quote(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def page_html(
    story: Story,
    sample: Sequence[StepEnded | BucketReduced],
    *,
    title: str,
    quoted: Mapping[str, str],
) -> str:
    """The whole page; `sample` has the steps to draw one by one, `quoted` the files to show as they are."""
    steps = [event for event in sample if isinstance(event, StepEnded)]
    buckets = [event for event in sample if isinstance(event, BucketReduced)]
    parts = [_header(story, title), _tiles(story.summary)]
    if story.summary.steps:
        parts += [
            waiting(story) if story.together else agreed(story),
            learning(story),
            speed(story),
            time_split(story.summary),
        ]
        parts += [communication(story.summary), close_up(steps, story.summary, buckets)]
    else:
        parts.append(section("No steps", "<p>No step was recorded, so there is nothing to draw.</p>"))
    parts += [_happenings(story.happenings), _logged(story), _appendix(quoted)]
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


def _header(story: Story, title: str) -> str:
    summary = story.summary
    began = datetime.fromtimestamp(story.began or 0.0, tz=UTC)
    command = f" · <code>{safe(story.command)}</code>" if story.command else ""
    look = summary.outcome if summary.outcome in _OUTCOMES else "unfinished"
    failure = f'<section class="failure">{safe(summary.failure)}</section>' if summary.failure else ""
    return (
        f'<header><h1>{safe(title)}<span class="badge {look}">{safe(summary.outcome)}</span></h1>'
        f'<p class="muted">began {began:%Y-%m-%d %H:%M:%S} UTC{command}</p></header>{failure}'
    )


def _tiles(summary: Summary) -> str:
    tiles = {
        "workers": f"{summary.world_size}",
        "steps": f"{summary.steps if summary.agreement is None else summary.all_steps:,}",
        "updates": f"{summary.agreement.updates:,}"
        if summary.agreement and summary.agreement.served
        else "",
        "epochs": f"{summary.epochs:,}" if summary.epochs else "",
        "from first to last step": show_seconds(summary.seconds),
        "samples/s": f"{summary.samples_per_s:,.0f}",
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


def _happenings(happenings: Sequence[Happening]) -> str:
    if not happenings:
        return ""
    weighty = sorted(happenings, key=lambda h: h.kind == "note")[:_MOST_HAPPENINGS]
    rows = [
        [show_seconds(h.at_s), h.kind, "launcher" if h.rank == LAUNCHER else f"rank {h.rank}", h.text]
        for h in sorted(weighty, key=lambda h: h.at_s)
    ]
    body = table(["after", "kind", "told by", "what"], rows, words={1, 2}, wide=3)
    if len(happenings) > _MOST_HAPPENINGS:
        body += about(f"and {len(happenings) - _MOST_HAPPENINGS:,} more")
    return section("What happened", body)


def _logged(story: Story) -> str:
    if not story.logged:
        return ""
    rows = [
        [name, f"{value.times:,}", f"{value.last:.5g}", f"{value.least:.5g}", f"{value.most:.5g}"]
        for name, value in sorted(story.logged.items())
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
