"""What a run's sentences say is what its tables and curves show: one definition of each figure."""

from __future__ import annotations

import html
import io
import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from echelon.observe.closing import closing_table
from echelon.observe.events import AnyEvent, BucketReduced, StepEnded, WorkerJoined
from echelon.observe.page.history import collect_history
from echelon.observe.page.sections import communication, time_split, waiting
from echelon.observe.page.sync import synchronisation
from echelon.observe.summary import Summary, summarise
from echelon.observe.trace import chrome_trace
from echelon.observe.verdict import verdict, wire_verdict

_UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds(text: str) -> float:
    """The seconds of '3.2 ms' or '1 min 5 s'."""
    minutes, _, rest = text.rpartition("min ")
    number, unit = rest.split()
    return 60 * float(minutes or 0) + float(number.replace(",", "")) * _UNITS[unit]


def tables(page: str) -> list[dict[str, list[str]]]:
    """The columns of the page's tables."""
    found = []
    for drawn in re.findall(r"<table.*?</table>", page, re.S):
        rows = [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
            for row in re.findall(r"<tr.*?</tr>", drawn, re.S)
        ]
        head, *body = [[html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in row] for row in rows]
        found.append({name: [row[at] for row in body] for at, name in enumerate(head)})
    return found


def closing(summary: Summary) -> str:
    out = io.StringIO()
    Console(file=out, width=4000).print(closing_table(summary))
    return out.getvalue()


def closing_rows(text: str) -> dict[str, list[str]]:
    """The cells of each worker's row, in two blanks or more."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.split("\n") if line.strip()]
    head = next(cells for cells in lines if cells[0] == "rank")
    return {cells[0]: cells for cells in lines if len(cells) == len(head) and cells[0].isdigit()} | {
        "": head
    }


RUNS = st.fixed_dictionaries(
    {
        "speeds": st.lists(st.sampled_from([200.0, 400.0, 800.0, 1600.0]), min_size=4, max_size=4).map(
            tuple
        ),
        "shares": st.lists(st.integers(1, 40), min_size=4, max_size=4).map(tuple),
        "steps_per_epoch": st.integers(2, 30),
        "buckets": st.integers(0, 3),
        "timed": st.booleans(),
        "links": st.sampled_from([(), ((0, 1, 2e6), (1, 0, 4e5)), ((2, 3, 1e9),)]),
        "seed": st.integers(0, 9),
        "skew_s": st.sampled_from([(), (0.0, 5.0, -3.0, 1.0)]),
    }
)


def normalised(events: list[AnyEvent], late_s: float) -> list[AnyEvent]:
    """The same run, in which all workers also meet in batch normalisation, and rank 1 comes late there."""
    made = []
    for event in events:
        if isinstance(event, BucketReduced):
            shift_s = (event.step + 1) * late_s
            instants = {name: getattr(event, name) for name in ("t", "start", "begun", "sent", "ended")}
            shifted = {name: at + shift_s for name, at in instants.items() if at}
            event = msgspec.structs.replace(event, **shifted)
        elif isinstance(event, StepEnded):
            shift_s = (event.step + 1) * late_s
            own_s, wait_s = (late_s, 2e-5) if event.rank == 1 else (0.0, late_s + 2e-5)
            event = msgspec.structs.replace(
                event,
                t=event.t + shift_s,
                start=event.start + shift_s - late_s,
                arrival=event.arrival + shift_s,
                compute_s=event.compute_s + own_s,
                wait_s=event.wait_s + wait_s,
                exchanges_us=[(round((event.data_s + own_s) * 1e6), round(wait_s * 1e6))],
            )
        made.append(event)
    return made


@settings(max_examples=40)
@given(RUNS, st.sampled_from([0.0, 0.05]))
def test_sentences_and_columns_of_a_run_agree(imagined, a_plan, drawn, late_s):
    events = [
        msgspec.structs.replace(event, t=event.t + 0.004 * event.rank)  # in the script's own code
        if isinstance(event, StepEnded)
        else event
        for event in imagined(a_plan(epochs=1, **drawn))
    ]
    if late_s:
        events = normalised(events, late_s)
    history = collect_history(events)
    summary = history.summary
    assert summarise(events) == summary
    said, wire = verdict(summary), wire_verdict(summary)
    text = closing(summary)
    assert said in text
    assert wire in text

    if summary.communication is not None:
        (columns,) = tables(communication(summary))
        distances = [float(cell) for cell in columns["step / limit"] if cell != "–"]
        if found := re.search(r"A step took ([\d.]+) times", wire):
            assert float(found.group(1)) == max(distances)
        for flight, exposed in zip(columns["in flight"], columns["exposed"], strict=True):
            assert flight == "–" or seconds(exposed) <= seconds(flight)
        if found := re.search(r"([\d]+) % of communication was hidden", wire):
            hidden = [int(cell.split()[0]) for cell in columns["hidden"] if cell != "–"]
            assert min(hidden) <= int(found.group(1)) <= max(hidden)

    rows = closing_rows(text)
    last, delayed = rows[""].index("last"), rows[""].index("delayed")
    if found := re.search(
        r"ank (\d+) \(.*?\) (?:arrived last|kept the others waiting longest) in (\d+ %)", said
    ):
        assert rows[found.group(1)][last] == found.group(2)
        cost = re.search(r"cost the others (.*?), ", said)
        assert cost is not None
        assert seconds(cost.group(1)) == pytest.approx(seconds(rows[found.group(1)][delayed]), abs=0.06)
        assert f"last in {found.group(2)} of rounds" in waiting(history)
    for worker in summary.workers:
        parts_s = worker.data_s + worker.compute_s + worker.wait_s + worker.apply_s + worker.other_s
        assert parts_s == pytest.approx(worker.step_s)
        assert worker.late_s <= worker.wait_s + 1e-5
    assert sum(worker.held_up_s for worker in summary.workers) == pytest.approx(summary.spread_s, abs=1e-6)
    assert summary.spread_s <= summary.seconds


@settings(max_examples=25)
@given(RUNS, st.lists(st.integers(1, 40), min_size=4, max_size=4), st.integers(1, 50))
def test_sentences_and_columns_agree_if_shares_change(rebalanced, a_plan, drawn, shares, steps):
    plan = a_plan(epochs=1, **(drawn | {"buckets": 0}))
    events = rebalanced(plan, shares, steps=steps)
    history = collect_history(events)
    summary = history.summary
    assert summarise(events) == summary
    said, rows = verdict(summary), closing_rows(closing(summary))
    judged = max(0, steps - 3)
    changed = f"from step {drawn['steps_per_epoch']} on: {','.join(map(str, shares))} (before "
    assert changed in said
    assert (summary.settled is not None) == (judged >= min(20, summary.rounds / 2) and judged > 0)
    assert ("shortly before the end" in said) == (summary.settled is None)
    assert all(worker.rounds == summary.judged.rounds for worker in summary.judged.workers)
    if summary.settled is not None:
        assert summary.judged.rounds == judged
    last = rows[""].index("last")
    if found := re.search(r"ank (\d+) \(\S*\) arrived last in (\d+ %)", said):
        assert summary.settled is not None
        assert rows[found.group(1)][last] == found.group(2)
        assert f"last in {found.group(2)} of rounds" in waiting(history)
    assert "--shares" not in said


@settings(max_examples=40)
@given(
    step_s=st.lists(st.sampled_from([0.01, 0.013, 0.02, 0.07]), min_size=2, max_size=4),
    need=st.integers(1, 4),
    steps=st.integers(30, 120),
    joined_late=st.integers(0, 3),
)
def test_sentences_and_curves_of_a_served_run_agree(
    imagined_served, a_served_plan, step_s, need, steps, joined_late
):
    plan = a_served_plan(step_s=step_s, need=min(need, len(step_s)), steps=steps, rounds=False, sync="x")
    events = _with_larger_updates(imagined_served(plan), joined_late)
    history = collect_history(events)
    sync = history.summary.sync
    assert sync is not None
    if not sync.updates:
        return
    said = verdict(history.summary)
    curve = [stretch.parts for stretch in history.course if stretch.updates]
    found = re.search(
        r"made ([\d,]+) updates?, (?:([\d,]+) of them|each) from (one|\d+|[\d.]+)(?: of \d+)? gradients?"
        r"( on average)?",
        said,
    )
    assert found is not None, said
    assert int(found.group(1).replace(",", "")) == sync.updates
    usual = 1.0 if found.group(3) == "one" else float(found.group(3))
    if found.group(4):
        assert usual == pytest.approx(sync.applied / sync.updates, abs=0.05)
    elif found.group(2):
        assert sync.parts[int(usual)] == int(found.group(2).replace(",", ""))
        others = re.search(r"the others from (\d+)(?: to (\d+))?", said)
        assert others is not None
        numbers = [int(number) for number in others.groups() if number]
        assert {min(numbers), max(numbers)} <= sync.parts.keys() - {int(usual)}
        assert max(curve) <= max(usual, *numbers)
    else:
        assert set(curve) == {usual}
        assert sync.parts == {int(usual): sync.updates}
    (pushes, *_) = tables(synchronisation(history))
    assert sum(int(cell.replace(",", "")) for cell in pushes["applied"]) == sync.applied
    held_s = sum(seconds(cell) for cell in pushes["held"])
    in_steps_s = sum(worker.step_s for worker in history.summary.workers)
    rounding_s = 0.05 * len(pushes["held"]) + 0.005 * in_steps_s
    if found := re.search(r"made workers wait for (\d+) % of their time", said):
        assert held_s == pytest.approx(int(found.group(1)) / 100 * in_steps_s, abs=rounding_s)
    else:
        assert held_s < 0.01 * in_steps_s + rounding_s


def _with_larger_updates(events: list[AnyEvent], count: int) -> list[AnyEvent]:
    """The same run, in which the first updates have a gradient twice: a curve that reaches one more."""
    made = []
    for event in events:
        if getattr(event, "what", "") == "apply" and count:
            count -= 1
            event = msgspec.structs.replace(event, parts=[*event.parts, event.parts[0]])
        made.append(event)
    return made


def test_a_run_of_local_1_is_shown_like_one_of_full_everywhere(imagined):
    full = imagined()
    as_local = [
        msgspec.structs.replace(event, sync="local(1)", family="reduce")
        if isinstance(event, WorkerJoined)
        else event
        for event in full
    ]
    assert closing(summarise(as_local)) == closing(summarise(full))
    assert waiting(collect_history(as_local)) == waiting(collect_history(full))
    assert chrome_trace(as_local, "local(1)")["traceEvents"] == chrome_trace(full)["traceEvents"]


def test_no_share_is_recommended_to_a_worker_that_is_told_otherwise(imagined, a_plan):
    history = collect_history(normalised(imagined(a_plan(speeds=(800.0,) * 4)), 0.2))
    asleep = [
        msgspec.structs.replace(event, cpu_s=0.02, starved_s=0.0) if isinstance(event, StepEnded) else event
        for event in normalised(imagined(a_plan(speeds=(800.0,) * 4)), 0.2)
    ]
    assert "balanced share" in time_split(history.summary)
    assert "did not want a core" in verdict(summarise(asleep))
    assert "balanced share" not in time_split(summarise(asleep))
