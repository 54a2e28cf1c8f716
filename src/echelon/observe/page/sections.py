"""The sections of the report's page, one function each: charts and their explanations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.arrival import ObservedRound, clock_offsets, rounds_of, same_clock
from echelon.observe.events import BucketReduced, StepEnded
from echelon.observe.overlap import WorkerCommunication, in_flight
from echelon.observe.page.charts import Bar, Mark, Segment, Series, line_chart, row_chart
from echelon.observe.page.history import RunHistory, throughput
from echelon.observe.page.markup import about, figure, legend, safe, section, table
from echelon.observe.page.scale import (
    Axis,
    Point,
    count_axis,
    percent_axis,
    smooth,
    thin,
    time_axis,
    time_unit,
    value_axis,
)
from echelon.observe.reason import fitting_shares, percent, shares_may_help, worker_name
from echelon.observe.spans import end_of, spans
from echelon.observe.summary import Summary
from echelon.observe.verdict import verdict, wire_verdict
from echelon.observe.worker_figures import WorkerSummary

_ACTIVITIES = {
    "data": "data",
    "compute": "compute",
    "late": "wait for late workers",
    "held": "wait, ordered by the sync policy",
    "exchange": "exchange",
    "apply": "apply (optimizer)",
    "other": "other",
    "wire": "buckets in flight",
}
SINCE = "time since the first step"
_MEET_OFTEN = (
    " Where workers wait for each other several times in a step (the statistics of batch normalisation, "
    "several backward passes), or only in the next step, charges are summed over the step, and the last "
    "worker is the one that is charged most."
)


def waiting(history: RunHistory) -> str:
    """Who kept the others waiting: the verdict, a bar per worker, the spread over time."""
    summary = history.summary
    body = f'<p class="verdict">{safe(verdict(summary))}</p>'
    if summary.rounds:
        remark = (
            "In each round, the time between two arrivals is charged in equal parts to the workers still "
            "missing, so a round's charges sum to the time from its first to its last arrival."
        )
        if summary.judged.meet_often:
            remark += _MEET_OFTEN
        if summary.settled is not None:
            remark += (
                f" Bars: rounds from step {summary.settled.step:,} on, after the last change of shares. "
                "Curve: the whole run."
            )
        body += about(remark)
        body += held_up(summary.judged) + _spread(history)
    return section("Who kept the others waiting", body)


def held_up(summary: Summary) -> str:
    """How long each worker kept the others waiting; empty if they did not meet."""
    if not summary.rounds:
        return ""
    scale, unit = time_unit(max(worker.held_up_s for worker in summary.workers))
    bars = []
    for worker in summary.workers:
        tip = (
            f"{worker_name(worker)}\n"
            f"kept the others waiting {show_seconds(worker.held_up_s)}\n"
            f"was the only one missing for {show_seconds(worker.alone_s)}\n"
            f"was last in {worker.times_last:,} of {worker.rounds:,} rounds"
        )
        piece = Segment(begin=0.0, end=worker.held_up_s / scale, look="late", tip=tip)
        last = percent(worker.times_last, worker.rounds)
        note = f"{worker.held_up_s / scale:,.1f} {unit}, last in {last} of rounds"
        bars.append(Bar(label=worker_name(worker), segments=[piece], note=note))
    seconds = [worker.held_up_s / scale for worker in summary.workers]
    axis = value_axis(seconds, f"kept the others waiting for [{unit}]")
    return figure(row_chart(bars, axis, label="how long each worker kept the others waiting"))


def _spread(history: RunHistory) -> str:
    known = {p.end_s: (p, p.spread_s) for p in history.rounds if p.spread_s is not None}
    scale, unit = time_unit(max(spread for _, spread in known.values()))
    points = thin([(end_s, known[end_s][1] / scale) for end_s in sorted(known)])
    tips = [
        f"step {known[x][0].step:,}: {y:.3g} {unit}, rank {known[x][0].last} was last" for x, y in points
    ]
    chart = line_chart(
        [Series(look="spread", points=points, tips=tips, area=True)],
        time_axis(*time_range(history), SINCE),
        value_axis([y for _, y in points], f"from first to last arrival [{unit}]", about=4),
        label="spread of arrivals over time",
        marks=fault_marks(history),
        height=200,
    )
    return figure(chart, "Spread of arrivals over time")


def time_range(history: RunHistory) -> tuple[float, float]:
    """From the first step's begin, 0, to the last step's end."""
    return min(p.begin_s for p in history.rounds), max(p.end_s for p in history.rounds)


def fault_marks(history: RunHistory) -> list[Mark]:
    """Marks at faults and failures."""
    return [Mark(at=h.at_s, text=h.text) for h in history.incidents if h.kind in ("fault", "failure")]


def learning(history: RunHistory) -> str:
    """Train loss, test loss and accuracy by step; over time if workers do not step together."""
    if not history.together:
        return _learning_over_time(history)
    train = [(float(p.step), p.loss) for p in history.rounds if p.loss is not None]
    test = [(float(e.step), e.loss) for e in history.evaluations if e.loss is not None]
    accuracy = [(float(e.step), e.accuracy) for e in history.evaluations if e.accuracy is not None]
    steps = _steps_axis([*train, *test, *accuracy])
    return _learning(train, test, accuracy, steps, "by step", lambda x: f"step {x:,.0f}")


def _steps_axis(points: Sequence[Point]) -> Axis:
    xs = [int(x) for x, _ in points] or [0]
    return count_axis(min(xs), max(xs), "step")


def _learning_over_time(history: RunHistory) -> str:
    zero = history.first_step
    train = [(p.end_s, p.loss) for p in history.rounds if p.loss is not None]
    test = [(e.t - zero, e.loss) for e in history.evaluations if e.loss is not None]
    accuracy = [(e.t - zero, e.accuracy) for e in history.evaluations if e.accuracy is not None]
    xs = [0.0, *(x for x, _ in [*train, *test, *accuracy])]
    axis = time_axis(min(xs), max(xs), SINCE)
    return _learning(train, test, accuracy, axis, "over time", lambda x: f"at {show_seconds(x)}")


def _learning(
    train: Sequence[Point],
    test: Sequence[Point],
    accuracy: Sequence[Point],
    axis: Axis,
    how: str,
    at: Callable[[float], str],
) -> str:
    if not train and not test:
        return section("Learning", "<p>No loss was reported.</p>")
    losses = line_chart(
        _train_series(train, at) + _test_series(test, at),
        axis,
        value_axis([y for _, y in [*train, *test]], "loss"),
        label=f"loss {how}",
    )
    names = {"train": "train loss, all workers"} if train else {}
    body = legend(names | ({"test": "test loss"} if test else {})) + figure(losses)
    if accuracy:
        shown = thin(accuracy)
        tips = [f"{at(x)}: {100 * y:.2f} %" for x, y in shown]
        curve = line_chart(
            [Series(look="accuracy", points=shown, tips=tips, dots=len(shown) <= 50)],
            axis,
            percent_axis([y for _, y in shown], "test accuracy"),
            label=f"test accuracy {how}",
            height=190,
        )
        body += figure(curve)
    return section("Learning", body)


def _train_series(points: Sequence[Point], at: Callable[[float], str]) -> list[Series]:
    shown = thin(points)
    tips = [f"{at(x)}: train loss {y:.4g}" for x, y in shown]
    if len(points) <= 60:
        return [Series(look="train", points=shown, tips=tips)] if points else []
    return [
        Series(look="raw", points=shown, tips=tips),
        Series(look="train", points=thin(smooth(points, len(points) // 50))),
    ]


def _test_series(points: Sequence[Point], at: Callable[[float], str]) -> list[Series]:
    shown = thin(points)
    tips = [f"{at(x)}: test loss {y:.4g}" for x, y in shown]
    return [Series(look="test", points=shown, tips=tips, dots=len(shown) <= 50)] if points else []


def speed(history: RunHistory) -> str:
    """Throughput of all workers over time."""
    points = throughput(history.rounds)
    if not points:
        return ""
    begin, end = time_range(history)
    points = [(begin, points[0][1]), *points, (end, points[-1][1])]
    tips = [f"at {show_seconds(x)}: {y:,.0f} samples/s" for x, y in points]
    chart = line_chart(
        [Series(look="rate", points=points, tips=tips, area=True)],
        time_axis(*time_range(history), SINCE),
        value_axis([y for _, y in points], "samples/s", about=4),
        label="throughput over time",
        marks=fault_marks(history),
        height=200,
    )
    return section("Throughput", about("All workers together, evaluations included.") + figure(chart))


def time_split(summary: Summary) -> str:
    """What each worker spent its time on: a stacked bar per worker, and the figures."""
    scale, unit = time_unit(max(worker.step_s for worker in summary.workers))
    held_s = {w.rank: w.held_s for w in summary.sync.workers} if summary.sync else {}
    bars = [_split_bar(worker, scale, held_s.get(worker.rank, 0.0)) for worker in summary.workers]
    axis = value_axis([worker.step_s / scale for worker in summary.workers], f"time in steps [{unit}]")
    chart = row_chart(bars, axis, label="where each worker's time went")
    other = "Other: the script's own code between the parts of a step."
    remark = (
        "Until the last worker of a round has arrived, the others wait for late workers; after that, all "
        "wait for the exchange itself."
    )
    if summary.sync is not None and summary.sync.served:
        remark = (
            "Exchange: waiting for the server, beyond the time for which the policy made the worker wait."
        )
    elif not summary.rounds:
        remark = "Exchange: waiting for other workers and exchanging weights with them."
    body = about(f"{remark} {other}") + _legend_of(bars) + figure(chart) + _worker_table(summary)
    return section("Where the time went", body)


def _split_bar(worker: WorkerSummary, scale: float, held_s: float) -> Bar:
    held_s = min(held_s, max(0.0, worker.wait_s - worker.late_s))
    seconds = {
        "data": worker.data_s,
        "compute": worker.compute_s,
        "late": worker.late_s,
        "held": held_s,
        "exchange": max(0.0, worker.wait_s - worker.late_s - held_s),
        "apply": worker.apply_s,
        "other": worker.other_s,
    }
    pieces = []
    begin = 0.0
    for look, spent_s in seconds.items():
        if spent_s <= 0:
            continue
        share = f"{100 * spent_s / worker.step_s:.0f} %"
        tip = f"{worker_name(worker)}\n{_ACTIVITIES[look]}: {show_seconds(spent_s)}, {share}"
        end = begin + spent_s / scale
        pieces.append(Segment(begin=begin, end=end, look=look, tip=tip, text=share))
        begin = end
    return Bar(label=worker_name(worker), segments=pieces)


def _legend_of(bars: Sequence[Bar]) -> str:
    drawn = {piece.look for bar in bars for piece in (*bar.segments, *bar.under)}
    return legend({look: name for look, name in _ACTIVITIES.items() if look in drawn})


def _worker_table(summary: Summary) -> str:
    # Shares that follow measured speeds already need no better ones.
    wanted = summary.sync is None and not summary.shares_adapt and shares_may_help(summary)
    fitting = fitting_shares(summary) if wanted else {}
    rows = []
    for worker in summary.workers:
        row = {
            "rank": str(worker.rank),
            "node": worker.node,
            "steps": f"{worker.steps:,}",
            "mean share": f"{worker.mean_share:.1f}",
            "balanced share": f"{fitting.get(worker.rank, 0):.1f}",
            "samples/s": f"{worker.samples_per_s:,.0f}",
            "compute": show_seconds(worker.compute_s),
            "wait": show_seconds(worker.wait_s),
            "sent": show_bytes(worker.sent_bytes),
        }
        if len(fitting) < 2:
            del row["balanced share"]
        rows.append(row)
    remark = (
        "Balanced share: the share of the same batch at which all workers would need equally long for data "
        "and compute, by the measured cost of a step."
    )
    drawn = table(list(rows[0]), [list(row.values()) for row in rows], words={1})
    return drawn + (about(remark) if len(fitting) > 1 else "")


def communication(summary: Summary) -> str:
    """How much communication was hidden, and what limits a step: the verdict and a row per worker."""
    went = summary.communication
    said = wire_verdict(summary)
    verdict_line = f'<p class="verdict">{safe(said)}</p>' if said else ""
    if went is None:
        return section("Communication", verdict_line) if said else ""
    remark = about(
        "Medians per step. In flight: the time in which buckets were being exchanged. Exposed: the part of "
        "it for which training had to wait; the rest was hidden behind computation. Late: waiting for late "
        "workers at the round, included in neither. Wire limit: the bytes sent, divided by the rate of the "
        "worker's slowest link. Limit: the largest compute time or wire limit of all workers."
    )
    rows = [_communication_row(worker, summary) for worker in went.workers]
    drawn = table(list(rows[0]), [list(row.values()) for row in rows], words={1, 11})
    return section("Communication", verdict_line + remark + drawn)


def _communication_row(worker: WorkerCommunication, summary: Summary) -> dict[str, str]:
    nodes = {known.rank: known.node for known in summary.workers}
    link = "–"
    if worker.peer is not None and worker.bytes_per_s is not None:
        link = f"{show_bytes(worker.bytes_per_s)}/s to rank {worker.peer}"
    return {
        "rank": str(worker.rank),
        "node": nodes.get(worker.rank, ""),
        "in flight": show_seconds(worker.communication_s) if worker.communication_s is not None else "–",
        "exposed": show_seconds(worker.exposed_s),
        "late": show_seconds(worker.late_s),
        "hidden": f"{100 * worker.hidden:.0f} %" if worker.hidden is not None else "–",
        "sent": show_bytes(worker.sent_bytes),
        "compute": show_seconds(worker.compute_s),
        "step": show_seconds(worker.step_s),
        "wire limit": show_seconds(worker.wire_limit_s) if worker.wire_limit_s is not None else "–",
        "step / limit": f"{worker.distance:.2f}" if worker.distance is not None else "–",
        "slowest link": link,
    }


def close_up(steps: Sequence[StepEnded], summary: Summary, buckets: Sequence[BucketReduced] = ()) -> str:
    """A few steps, worker by worker: what each was doing when the last one arrived."""
    if not steps:
        return ""
    offsets = (
        clock_offsets(rounds_of(steps)) if summary.judged_by == "wait" and summary.sync is None else {}
    )
    steps = [same_clock(step, offsets) for step in steps]
    buckets = [same_clock(bucket, offsets) for bucket in buckets]
    begin = min(step.start for step in steps)
    end = max(end_of(step) for step in steps)
    rounds = [r for r in rounds_of(steps) if len(r.workers) > 1] if summary.sync is None else []
    last_arrivals = sorted(at for round_ in rounds for at in _last_arrivals(round_))
    bars = []
    for worker in summary.workers:
        own = sorted((step for step in steps if step.rank == worker.rank), key=lambda step: step.start)
        pieces = [piece for step in own for piece in _pieces(step, begin, last_arrivals)]
        under = _in_flight([b for b in buckets if b.rank == worker.rank], begin, end)
        bars.append(Bar(label=worker_name(worker), segments=pieces, under=under))
    chart = row_chart(
        bars,
        time_axis(0.0, end - begin, "time"),
        label="a few steps, worker by worker",
        uprights=[_last_arrivals(round_)[-1] - begin for round_ in rounds],
    )
    first, last = min(step.step for step in steps), max(step.step for step in steps)
    which = f"Step {first:,}" if first == last else f"Steps {first:,} to {last:,}"
    if summary.sync is not None:
        which = "A few steps of each worker"
    dotted = " Dotted lines: the last arrival at each round." if rounds else ""
    clocks = " The workers' clocks disagree; times were corrected for this chart." if offsets else ""
    body = about(f"{which}, from the middle of the run.{dotted}{clocks}") + _legend_of(bars) + figure(chart)
    return section("A few steps close up", body)


def _in_flight(buckets: Sequence[BucketReduced], begin: float, end: float) -> list[Segment]:
    """One worker's thin line: when its buckets were in flight, within the chart."""
    pieces = []
    for since, until in in_flight(buckets):
        count = sum(since <= bucket.begun < until for bucket in buckets)
        named = "1 bucket" if count == 1 else f"{count} buckets"
        tip = f"rank {buckets[0].rank}\n{named} in flight: {show_seconds(until - since)}"
        pieces.append(
            Segment(begin=max(0.0, since - begin), end=min(until, end) - begin, look="wire", tip=tip)
        )
    return pieces


def _last_arrivals(round_: ObservedRound) -> list[float]:
    """When the last worker came to each meeting of the step; to the round last."""
    at_round = max(step.arrival for step in round_.workers.values())
    return [*(max(came for came, _ in meeting.values()) for meeting in round_.meetings), at_round]


def _pieces(step: StepEnded, begin: float, last_arrivals: Sequence[float]) -> list[Segment]:
    parts: list[tuple[str, float, float]] = []
    for activity, since, until in spans(step):
        if activity == "wait":
            turn = max((at for at in last_arrivals if since < at < until), default=since)
            parts += [("late", since, turn), ("exchange", turn, until)]
        else:
            parts.append((activity, since, until))
    return [
        Segment(
            begin=since - begin,
            end=until - begin,
            look=look,
            tip=f"rank {step.rank}, step {step.step:,}\n{_ACTIVITIES[look]}: {show_seconds(until - since)}",
        )
        for look, since, until in parts
        if until > since
    ]
