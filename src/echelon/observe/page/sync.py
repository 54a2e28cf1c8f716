"""How workers agreed, where they do not step together: a sentence, pictures over time, a row per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.config.units import show_seconds
from echelon.observe.page.charts import Bar, Segment, Series, line_chart, row_chart
from echelon.observe.page.markup import about, figure, legend, safe, section, table
from echelon.observe.page.scale import Axis, time_axis, value_axis
from echelon.observe.page.sections import SINCE, fault_marks, time_range
from echelon.observe.page.story import Story
from echelon.observe.summary import Summary
from echelon.observe.sync import Stretch, SyncFigures, WorkerSync
from echelon.observe.verdict import verdict, worker_name

_MOST_ROWS = 40
_LOOKS = {"compute": "applied", "late": "dropped", "other": "went on alone"}


def agreed(story: Story) -> str:
    """The section; where no server decided there is nothing to draw."""
    summary = story.summary
    assert summary.agreement is not None
    body = f'<p class="verdict">{safe(verdict(summary))}</p>'
    if not summary.agreement.served:
        return section("How workers agreed", body + _exchanges(summary, summary.agreement))
    if story.course:
        body += _pictures(story, summary.agreement)
    body += _pushes(summary, summary.agreement) + _ages(summary.agreement) + _reasons(summary.agreement)
    return section("How workers agreed", body)


def _pictures(story: Story, agreement: SyncFigures) -> str:
    ahead_s = agreement.began - (story.began or 0.0)
    course = [(ahead_s + stretch.begin_s, stretch) for stretch in story.course]
    low, high = time_range(story)
    axis = time_axis(min(low, ahead_s), max(high, course[-1][0] + course[-1][1].seconds), SINCE)
    drawn = _rows(story.summary, agreement, course, axis)
    made = [(at_s + s.seconds / 2, s) for at_s, s in course if s.updates]
    if len(agreement.parts) > 1:
        drawn += figure(_parts(story, made, axis), "Gradients per update over time")
    if agreement.age_most:
        drawn += figure(_old(story, made, axis), "Age of gradients over time")
        drawn += about(
            "In versions: updates made since the weights that a gradient was computed on were read."
        )
    return drawn


def _rows(
    summary: Summary, agreement: SyncFigures, course: Sequence[tuple[float, Stretch]], axis: Axis
) -> str:
    names = {worker.rank: worker_name(worker) for worker in summary.workers}
    ranks = [worker.rank for worker in agreement.workers]
    count = len(ranks)
    bars = [
        Bar(label=names.get(rank, f"rank {rank}"), segments=_cells(rank, course))
        for rank in ranks[:_MOST_ROWS]
    ]
    looks = {piece.look for bar in bars for piece in bar.segments}
    remark = "Each worker's pushes over time, and the steps that it was let take alone; by their shares."
    if count > _MOST_ROWS:
        remark += f" {count - _MOST_ROWS} more workers are not drawn."
    named = legend({look: name for look, name in _LOOKS.items() if look in looks})
    chart = row_chart(bars, axis, label="what became of each worker's pushes over time")
    return about(remark) + named + figure(chart)


def _cells(rank: int, course: Sequence[tuple[float, Stretch]]) -> list[Segment]:
    """Stretches in which one thing happened only are drawn as one, as long as they follow each other."""
    pieces: list[Segment] = []
    whole: list[tuple[float, Stretch]] = []

    def close() -> None:
        if whole:
            pieces.extend(_stack(rank, whole))
            whole.clear()

    for at_s, stretch in course:
        counts = _counts(rank, [stretch])
        if not any(counts.values()):
            close()
        elif sum(map(bool, counts.values())) == 1:
            if whole and _looks(rank, whole[-1][1]) != _looks(rank, stretch):
                close()
            whole.append((at_s, stretch))
        else:
            close()
            pieces += _stack(rank, [(at_s, stretch)])
    close()
    return pieces


def _counts(rank: int, stretches: Sequence[Stretch]) -> dict[str, int]:
    return {
        "compute": sum(s.applied[rank] for s in stretches),
        "late": sum(s.dropped[rank] for s in stretches),
        "other": sum(s.alone[rank] for s in stretches),
    }


def _looks(rank: int, stretch: Stretch) -> list[str]:
    return [look for look, count in _counts(rank, [stretch]).items() if count]


def _stack(rank: int, stretches: Sequence[tuple[float, Stretch]]) -> list[Segment]:
    counts = _counts(rank, [stretch for _, stretch in stretches])
    begin, end = stretches[0][0], stretches[-1][0] + stretches[-1][1].seconds
    said = ", ".join(f"{count:,} {_LOOKS[look]}" for look, count in counts.items() if count)
    tip = f"rank {rank}, {show_seconds(begin)} to {show_seconds(end)}\n{said}"
    pieces, low = [], 0.0
    for look, count in counts.items():
        high = low + count / sum(counts.values())
        if count:
            pieces.append(Segment(begin=begin, end=end, look=look, tip=tip, low=low, high=high))
        low = high
    return pieces


def _parts(story: Story, made: Sequence[tuple[float, Stretch]], axis: Axis) -> str:
    tips = [
        f"after {show_seconds(x)}: {s.parts:.2f} gradients per update, {s.updates:,} updates"
        for x, s in made
    ]
    return line_chart(
        [Series(look="rate", points=[(x, s.parts) for x, s in made], tips=tips, area=True)],
        axis,
        value_axis([s.parts for _, s in made], "gradients per update", about=4),
        label="gradients per update over time",
        marks=fault_marks(story),
        height=180,
    )


def _old(story: Story, made: Sequence[tuple[float, Stretch]], axis: Axis) -> str:
    def curve(look: str, value: Callable[[Stretch], float], word: str) -> Series:
        points = [(x, value(s)) for x, s in made]
        tips = [f"after {show_seconds(x)}: {y:.3g} {word}" for x, y in points]
        return Series(look=look, points=points, tips=tips)

    series = [
        curve("train", lambda s: s.age_mean, "versions on average"),
        curve("test", lambda s: float(s.age_most), "versions at most"),
    ]
    chart = line_chart(
        series,
        axis,
        value_axis([float(s.age_most) for _, s in made], "age [versions]", about=4),
        label="age of gradients over time",
        marks=fault_marks(story),
        height=180,
    )
    return legend({"train": "mean", "test": "oldest"}) + chart


def _pushes(summary: Summary, agreement: SyncFigures) -> str:
    names = {worker.rank: worker.node for worker in summary.workers}
    rows = [
        {
            "rank": str(worker.rank),
            "node": names.get(worker.rank, ""),
            "pushed": f"{worker.pushed:,}",
            "applied": f"{worker.applied:,}",
            "dropped": f"{worker.dropped:,}",
            "went on alone": f"{worker.alone:,}",
            "took part in": f"{100 * worker.took_part:.0f} %",
            "age": f"{worker.age_mean:.2f}",
            "oldest": f"{worker.age_most:,}",
            "held": show_seconds(worker.held_s),
        }
        for worker in agreement.workers
    ]
    remark = about(
        "Took part in: the share of updates that contain a push of the worker, of those made while its "
        "data lasted. Held: the time from its arrival at the server to being let go on."
    )
    return table(list(rows[0]), [list(row.values()) for row in rows], words={1}) + remark


def _ages(agreement: SyncFigures) -> str:
    """How many gradients were how old, in columns that double."""
    if not agreement.age_most:
        return ""
    bounds = [(0, 0), (1, 1)]
    while bounds[-1][1] < agreement.age_most:
        bounds.append((bounds[-1][1] + 1, 2 * (bounds[-1][1])))
    head = ["rank", *(f"{low}" if low == high else f"{low}–{high}" for low, high in bounds)]
    rows = [
        [str(worker.rank), *(_between(worker, low, high) for low, high in bounds)]
        for worker in agreement.workers
    ]
    return "<h3>Gradients applied, by age in versions</h3>" + table(head, rows)


def _between(worker: WorkerSync, low: int, high: int) -> str:
    return f"{sum(count for age, count in worker.ages.items() if low <= age <= high):,}"


def _reasons(agreement: SyncFigures) -> str:
    if not agreement.dropped:
        return ""
    rows = [[reason, f"{count:,}"] for reason, count in sorted(agreement.dropped_for.items())]
    return "<h3>Why gradients were dropped</h3>" + table(["reason", "gradients"], rows, words={0})


def _exchanges(summary: Summary, agreement: SyncFigures) -> str:
    own = {worker.rank: worker.exchanges for worker in agreement.workers}
    rows = [
        [str(w.rank), w.node, f"{w.steps:,}", f"{own.get(w.rank, 0):,}", show_seconds(w.wait_s)]
        for w in summary.workers
    ]
    return table(["rank", "node", "steps", "exchanges", "wait"], rows, words={1})
