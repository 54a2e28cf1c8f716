from __future__ import annotations

import io

import pytest
from rich.console import Console

from echelon.observe.events import (
    LAUNCHER,
    EpochEnded,
    Evaluated,
    Noted,
    StepEnded,
    StepsExpected,
)
from echelon.observe.progress import Progress, closing_table
from echelon.observe.summary import summarise


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _console(*, terminal: bool, **options) -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=options.pop("width", 80),
        height=options.pop("height", 30),
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": options.pop("term", "xterm")},
        **options,
    )


def _text(console: Console) -> str:
    return console.file.getvalue()  # type: ignore[attr-defined]


def _plain(events, pace_s: float = 0.0, total_steps: int | None = None) -> list[str]:
    console, clock = _console(terminal=False), Clock()
    with Progress(total_steps, console=console, clock=clock) as progress:
        for event in events:
            clock.now += pace_s
            progress.update([event])
    return _text(console).splitlines()


def test_without_a_terminal_each_evaluation_is_one_line(imagined):
    lines = _plain(imagined())
    assert [line.split(",")[0] for line in lines] == [
        "note: no latency shaping in this kernel",
        "epoch 1 evaluated",
        "epoch 2 evaluated",
        "epoch 3 evaluated",
    ]
    assert "samples/s" in lines[-1]
    assert lines[-1].endswith("test loss 0.304, accuracy 92.5 %")


def test_an_epoch_without_evaluation_has_its_line_once(imagined, a_plan):
    lines = _plain(imagined(a_plan(evaluate=False)))
    assert [line.split(",")[0] for line in lines[1:]] == ["epoch 1 ended", "epoch 2 ended", "epoch 3 ended"]


def test_an_evaluation_reported_by_several_workers_is_one_line(imagined, a_plan):
    steps = [e for e in imagined(a_plan(epochs=1)) if isinstance(e, StepEnded)]
    told = [
        Evaluated(t=2e9, rank=rank, epoch=0, step=40, loss=0.5, accuracy=0.9, samples=8)
        for rank in range(2)
    ]
    ended = [EpochEnded(t=2e9, rank=rank, epoch=0, step=40) for rank in range(4)]
    assert [line.split(",")[0] for line in _plain([*steps, *told, *ended])] == ["epoch 1 evaluated"]


def test_progress_lines_come_at_most_every_ten_seconds(imagined, a_plan):
    steps = [e for e in imagined(a_plan(epochs=1)) if isinstance(e, StepEnded)]
    lines = _plain(steps, pace_s=1.0, total_steps=40)
    assert len(lines) == len(steps) // 10
    assert lines[0].startswith("step 3 of 40 (epoch 1), ")


def test_no_line_is_printed_before_the_first_step():
    console, clock = _console(terminal=False), Clock()
    with Progress(console=console, clock=clock) as progress:
        clock.now = 100.0
        progress.update([])
    assert _text(console) == ""


def test_a_note_is_printed_once_and_the_launchers_notes_are_not():
    notes = [Noted(t=1.0, rank=rank, text="[bold]falls back") for rank in range(3)]
    lines = _plain([*notes, Noted(t=2.0, rank=LAUNCHER, text="said already")])
    assert lines == ["note: [bold]falls back"]


def test_faults_are_printed_as_they_happen(imagined, a_plan):
    assert "fault: slowed node-b down to 0.5 cores" in _plain(imagined(a_plan(faults=True)))


def test_on_a_terminal_there_is_one_display_with_a_row_per_worker(imagined):
    events = [StepsExpected(t=0.0, rank=0, steps=240), *imagined()]
    console, clock = _console(terminal=True), Clock()
    with Progress(console=console, clock=clock) as progress:
        progress.update([])
        clock.now += 1
        progress.update(events[:200])
        clock.now += 1
        progress.update(events[200:])
        shown = _text(console)
    last = shown[shown.rindex("step 120") :]
    assert last.startswith("step 120 of 240 (epoch 3)")
    assert " left" in last
    for node in ("node-a", "node-b", "node-c", "node-d"):
        assert node in last
    assert "█" in last
    assert "░" in last
    assert "accuracy 92.5 %" in last
    assert "epoch 3 evaluated" not in shown


def test_the_display_is_gone_when_the_run_is_over(imagined):
    console, clock = _console(terminal=True), Clock()
    with Progress(console=console, clock=clock) as progress:
        clock.now += 1
        progress.update(imagined())
    assert "\x1b[2K" in _text(console)[-60:]
    assert progress.summary.steps == 120


def test_a_terminal_that_cannot_redraw_gets_plain_lines(imagined):
    console = _console(terminal=True, term="dumb")
    with Progress(console=console) as progress:
        progress.update(imagined())
    assert "epoch 3 evaluated" in _text(console)
    assert "\x1b" not in _text(console)


def test_the_display_is_not_redrawn_too_often(imagined):
    console, clock = _console(terminal=True), Clock()
    with Progress(console=console, clock=clock) as progress:
        clock.now += 1
        progress.update(imagined()[:100])
        drawn = len(_text(console))
        clock.now += 0.01
        progress.update(imagined()[100:102])
        assert len(_text(console)) == drawn


def test_live_figures_are_those_of_the_last_seconds(imagined, a_plan):
    slow = imagined(a_plan(epochs=1, evaluate=False, speeds=(100.0,) * 4))
    steps = [e for e in slow if isinstance(e, StepEnded)]
    offset = max(e.t for e in steps) - min(e.start for e in steps)
    console, clock = _console(terminal=False), Clock()
    fast = [
        e for e in imagined(a_plan(epochs=1, evaluate=False, speeds=(9e5,) * 4)) if isinstance(e, StepEnded)
    ]
    with Progress(console=console, clock=clock) as progress:
        for batch in (steps, []):
            clock.now += 11
            progress.update(batch)
        clock.now += 11
        progress.update(
            StepEnded(
                **{name: getattr(e, name) for name in e.__struct_fields__}
                | {
                    "step": e.step + 40,
                    "t": e.t + offset,
                    "start": e.start + offset,
                    "arrival": e.arrival + offset,
                }
            )
            for e in fast
        )
    rates = [float(line.split(", ")[1].split()[0].replace(",", "")) for line in _text(console).splitlines()]
    assert rates[-1] > 10 * rates[0]


def test_more_workers_than_rows_are_counted(imagined, a_plan):
    plan = a_plan(speeds=(800.0,) * 25, shares=(8,) * 25, nodes=[f"n{i}" for i in range(25)], epochs=1)
    console, clock = _console(terminal=True, height=20), Clock()
    with Progress(console=console, clock=clock) as progress:
        clock.now += 1
        progress.update(imagined(plan))
        assert "and 13 more workers" in _text(console)


def _closing(summary, width: int = 80) -> str:
    console = _console(terminal=False, width=width)
    console.print(closing_table(summary))
    return _text(console)


def test_the_closing_table_fits_80_columns_and_has_all_figures(imagined):
    text = _closing(summarise(imagined()))
    assert all(len(line) <= 80 for line in text.splitlines())
    header = next(line for line in text.splitlines() if "rank" in line)
    assert " ".join(header.split()) == "rank node share samples/s compute wait sent last delayed"
    row = next(line for line in text.splitlines() if "node-d" in line).split()
    assert row[:3] == ["3", "node-d", "16"]
    assert "21.6 MB" in " ".join(row)
    assert "120 steps in" in text
    assert "accuracy 92.5 %" in text
    assert "Rank 3 (node-d) arrived last" in text


def test_long_names_and_figures_still_fit(imagined, a_plan):
    nodes = [f"a-rather-long-node-name-{index}" for index in range(4)]
    text = _closing(summarise(imagined(a_plan(nodes=nodes, shares=(1600,) * 4))))
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "delayed" in text
    assert "…" not in text


@pytest.mark.parametrize(
    ("situation", "missing"),
    [
        ({"speeds": (800.0,), "shares": (32,), "nodes": ("laptop",)}, "delayed"),
        ({"losses": False, "evaluate": False}, "loss"),
        ({"epochs": 0}, "samples/s"),
        ({"gaps": tuple(range(120))}, "delayed"),
    ],
)
def test_the_closing_table_leaves_out_unknown_figures(imagined, a_plan, situation, missing):
    assert missing not in _closing(summarise(imagined(a_plan(**situation))))


def test_without_events_the_closing_table_is_a_sentence():
    assert _closing(summarise([])) == "No step was recorded.\n"


def test_the_closing_table_says_what_limits_a_step_where_buckets_were_reported(imagined, a_plan):
    told = _closing(summarise(imagined(a_plan(buckets=4))), width=200)
    assert " ms of computing on rank 3 (node-d)." in told
    assert "times its lower limit" not in _closing(summarise(imagined()), width=200)


def test_if_workers_do_not_step_together_the_steps_of_all_are_counted(imagined_served, a_served_plan):
    events = imagined_served(a_served_plan(need=1, rounds=False, sync="async"))
    lines = _plain(events, pace_s=1.0)
    assert lines[0].split(",")[0].endswith("of about 200 steps of 4 workers (epoch 1)")
    for line in lines:
        done, total = int(line.split(" of ")[0]), int(line.split("about ")[1].split(" ")[0])
        assert done <= total
    assert not any(line.startswith("step ") for line in lines)


def test_the_expected_total_is_not_shown_once_it_is_exceeded(imagined_served, a_served_plan):
    events = [
        StepsExpected(t=e.t, rank=0, steps=10) if isinstance(e, StepsExpected) else e
        for e in imagined_served(a_served_plan(need=1, rounds=False, sync="async"))
    ]
    assert _plain(events, pace_s=1.0)[-1].split(",")[0].endswith(" steps of 4 workers (epoch 1)")
    assert "about" not in _plain(events, pace_s=1.0)[-1]
    assert "about 40 steps" in _plain(events, pace_s=1.0)[0]


def test_the_closing_table_of_a_served_run_has_its_drops_and_no_arrivals(imagined_served):
    summary = summarise(imagined_served())
    text = _closing(summary)
    assert all(len(line) <= 80 for line in text.splitlines())
    header = next(line for line in text.splitlines() if "rank" in line)
    assert " ".join(header.split()) == "rank node steps samples/s compute wait dropped held"
    assert f"{summary.all_steps} steps of 4 workers and 6" in text
    assert "delayed" not in text


def test_the_display_of_a_served_run_counts_each_workers_steps(imagined_served):
    console, clock = _console(terminal=True), Clock()
    with Progress(console=console, clock=clock) as progress:
        clock.now += 1
        progress.update(imagined_served())
        shown = _text(console)
    assert "of about 200 steps of 4 workers" in shown
    assert "last" not in shown
