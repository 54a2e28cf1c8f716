"""The section on synchronisation if workers do not step together: verdict, charts, a row per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.config.units import show_seconds
from echelon.observe.page.charts import Bar, Segment, Series, line_chart, row_chart
from echelon.observe.page.history import RunHistory
from echelon.observe.page.markup import about, figure, legend, safe, section, table
from echelon.observe.page.scale import Axis, time_axis, value_axis
from echelon.observe.page.sections import SINCE, fault_marks, held_up, time_range
from echelon.observe.reason import worker_name
from echelon.observe.summary import Summary
from echelon.observe.sync import Stretch, SyncFigures, WorkerSync
from echelon.observe.verdict import verdict

_MOST_ROWS = 40
_LOOKS = {"compute": "applied", "late": "dropped", "other": "continued alone"}


def synchronisation(history: RunHistory) -> str:
    """The section; there are charts only if there was a parameter server."""
    summary = history.summary
    assert summary.sync is not None
    body = f'<p class="verdict">{safe(verdict(summary))}</p>'
    if not summary.sync.served:
        return section("Synchronisation", body + held_up(summary) + _exchanges(summary, summary.sync))
    if history.course:
        body += _charts(history, summary.sync)
    body += _pushes(summary, summary.sync) + _ages(summary.sync) + _reasons(summary.sync)
    return section("Synchronisation", body)


def _charts(history: RunHistory, sync: SyncFigures) -> str:
    first_s = sync.began - history.first_step
    course = [(first_s + stretch.begin_s, stretch) for stretch in history.course]
    low, high = time_range(history)
    axis = time_axis(min(low, first_s), max(high, course[-1][0] + course[-1][1].seconds), SINCE)
    drawn = _rows(history.summary, sync, course, axis)
    made = [(at_s + s.seconds / 2, s) for at_s, s in course if s.updates]
    if len(sync.parts) > 1:
        drawn += figure(_parts(history, made, axis), "Gradients per update over time")
    if sync.age_most:
        drawn += figure(_old(history, made, axis), "Age of gradients over time")
        drawn += about("Age of a gradient: the number of updates made since its weights were read.")
    return drawn


def _rows(summary: Summary, sync: SyncFigures, course: Sequence[tuple[float, Stretch]], axis: Axis) -> str:
    names = {worker.rank: worker_name(worker) for worker in summary.workers}
    ranks = [worker.rank for worker in sync.workers]
    count = len(ranks)
    bars = [
        Bar(label=names.get(rank, f"rank {rank}"), segments=_cells(rank, course))
        for rank in ranks[:_MOST_ROWS]
    ]
    looks = {piece.look for bar in bars for piece in bar.segments}
    remark = (
        "Each worker's pushes over time: applied by the server or dropped; and the steps after which the "
        "worker continued with its own weights. Heights are shares of these counts."
    )
    if count > _MOST_ROWS:
        remark += f" {count - _MOST_ROWS} more workers are not drawn."
    named = legend({look: name for look, name in _LOOKS.items() if look in looks})
    chart = row_chart(bars, axis, label="what became of each worker's pushes over time")
    return about(remark) + named + figure(chart)


def _cells(rank: int, course: Sequence[tuple[float, Stretch]]) -> list[Segment]:
    """One worker's row; consecutive stretches with the same single kind of count are merged."""
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


def _parts(history: RunHistory, made: Sequence[tuple[float, Stretch]], axis: Axis) -> str:
    tips = [
        f"at {show_seconds(x)}: {s.parts:.2f} gradients per update, {s.updates:,} updates" for x, s in made
    ]
    return line_chart(
        [Series(look="rate", points=[(x, s.parts) for x, s in made], tips=tips, area=True)],
        axis,
        value_axis([s.parts for _, s in made], "gradients per update", about=4),
        label="gradients per update over time",
        marks=fault_marks(history),
        height=180,
    )


def _old(history: RunHistory, made: Sequence[tuple[float, Stretch]], axis: Axis) -> str:
    def curve(look: str, value: Callable[[Stretch], float], word: str) -> Series:
        points = [(x, value(s)) for x, s in made]
        tips = [f"at {show_seconds(x)}: {y:.3g} {word}" for x, y in points]
        return Series(look=look, points=points, tips=tips)

    series = [
        curve("train", lambda s: s.age_mean, "updates on average"),
        curve("test", lambda s: float(s.age_most), "updates at most"),
    ]
    chart = line_chart(
        series,
        axis,
        value_axis([float(s.age_most) for _, s in made], "age [updates]", about=4),
        label="age of gradients over time",
        marks=fault_marks(history),
        height=180,
    )
    return legend({"train": "mean", "test": "oldest"}) + chart


def _pushes(summary: Summary, sync: SyncFigures) -> str:
    names = {worker.rank: worker.node for worker in summary.workers}
    rows = [
        {
            "rank": str(worker.rank),
            "node": names.get(worker.rank, ""),
            "pushed": f"{worker.pushed:,}",
            "applied": f"{worker.applied:,}",
            "dropped": f"{worker.dropped:,}",
            "continued alone": f"{worker.alone:,}",
            "took part in": f"{100 * worker.took_part:.0f} %",
            "mean age": f"{worker.age_mean:.2f}",
            "largest age": f"{worker.age_most:,}",
            "held": show_seconds(worker.held_s),
            "delayed": show_seconds(worker.held_up_s),
        }
        for worker in sync.workers
    ]
    remark = about(
        "Continued alone: steps after which the worker kept its own weights. Took part in: the share of "
        "updates that contain a push of the worker, among those made while it was in the run. Held: how "
        "long the policy made the worker wait. Delayed: how long the worker kept those waiting that were "
        "released with it."
    )
    return table(list(rows[0]), [list(row.values()) for row in rows], words={1}) + remark


def _ages(sync: SyncFigures) -> str:
    """Numbers of gradients by age; each column covers twice as many ages as the one before."""
    if not sync.age_most:
        return ""
    bounds = [(0, 0), (1, 1)]
    while bounds[-1][1] < sync.age_most:
        bounds.append((bounds[-1][1] + 1, 2 * (bounds[-1][1])))
    head = ["rank", *(f"{low}" if low == high else f"{low}–{high}" for low, high in bounds)]
    rows = [
        [str(worker.rank), *(_between(worker, low, high) for low, high in bounds)]
        for worker in sync.workers
    ]
    return "<h3>Applied gradients by age in updates</h3>" + table(head, rows)


def _between(worker: WorkerSync, low: int, high: int) -> str:
    return f"{sum(count for age, count in worker.ages.items() if low <= age <= high):,}"


def _reasons(sync: SyncFigures) -> str:
    if not sync.dropped:
        return ""
    rows = [[reason, f"{count:,}"] for reason, count in sorted(sync.dropped_for.items())]
    return "<h3>Why gradients were dropped</h3>" + table(["reason", "gradients"], rows, words={0})


def _exchanges(summary: Summary, sync: SyncFigures) -> str:
    own = {worker.rank: worker.exchanges for worker in sync.workers}
    rows = [
        [str(w.rank), w.node, f"{w.steps:,}", f"{own.get(w.rank, 0):,}", show_seconds(w.wait_s)]
        for w in summary.workers
    ]
    return table(["rank", "node", "steps", "exchanges", "wait"], rows, words={1})
