"""What is shown of a run, decided from invented events and a clock that the test moves."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from echelon.observe.events import (
    AnyEvent,
    FaultInjected,
    Noted,
    RunEnded,
    StepEnded,
    StepsExpected,
    WorkersAwaited,
)
from echelon.observe.progress import Progress


def _shown(progress: Progress, now: float, height: int = 20) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None, legacy_windows=False)
    panel = progress.panel(now, height=height)
    if panel is not None:
        console.print(panel)
    return console.file.getvalue()  # type: ignore[attr-defined]


def _awaited(t: float, since: float, *ranks: int, by: int = 0, doing: str = "") -> WorkersAwaited:
    return WorkersAwaited(t=t, rank=by, step=1, since=since, awaited=list(ranks), doing=doing)


@pytest.fixture
def steps(imagined) -> list[AnyEvent]:
    return [event for event in imagined() if isinstance(event, StepEnded)]


def _running(steps: list[AnyEvent], *, total: int, **options) -> tuple[Progress, float]:
    """A run of four workers after 120 steps, and the time of the last."""
    progress = Progress(0.0, **{"lines": False, **options})
    progress.take([StepsExpected(t=0.0, rank=0, steps=total), *steps], 0.0)
    return progress, 0.0


# Stalls


def test_panel_says_who_is_missing_and_promises_nothing_until_steps_go_on(steps):
    progress, now = _running(steps, total=1000)
    shown = _shown(progress, now + 1)
    assert " left" in shown
    assert "samples/s  loss" in shown
    last = steps[-1].t
    progress.take([_awaited(last + 11, last, 1, by=rank) for rank in (0, 2, 3)], now + 11)
    shown = _shown(progress, now + 12)
    assert "no step for 12 s: rank 1 is missing\n" in shown
    assert " left" not in shown
    assert "samples/s  loss" not in shown
    assert "█" not in shown
    progress.take([_again(step, 13) for step in steps], now + 13)
    shown = _shown(progress, now + 14)
    assert "no step" not in shown
    assert " left" in shown


def _again(step: StepEnded, later: float) -> StepEnded:
    """A step like this one, so much later."""
    fields = {name: getattr(step, name) for name in step.__struct_fields__}
    moved = {name: fields[name] + later for name in ("t", "start", "arrival")}
    return StepEnded(**{**fields, **moved, "step": step.step + 120})


def test_silence_is_shown_without_anyone_saying_so(steps):
    progress, now = _running(steps, total=1000)
    assert "no step for 30 s\n" in _shown(progress, now + 30)
    assert " left" not in _shown(progress, now + 30)


def test_silence_after_the_last_step_is_nothing_to_mention(steps):
    progress, now = _running(steps, total=120)
    shown = _shown(progress, now + 30)
    assert "no step" not in shown
    assert " left" not in shown, "nothing is left"


def test_worker_that_is_missing_before_the_first_step_is_shown():
    progress = Progress(0.0, lines=False, script=True)
    assert _shown(progress, 5.0) == ""
    progress.take([_awaited(103.0, 100.0, 2)], 5.0)
    assert _shown(progress, 6.0) == "no step for 4 s: rank 2 is missing\n"


def test_worker_that_stopped_while_others_go_on_is_marked_in_its_row(steps):
    progress = Progress(0.0, lines=False)
    quick = steps[len(steps) // 2].t
    for step in steps:
        if step.rank != 2 or step.t < quick:
            progress.take([step], step.t)
    shown = _shown(progress, steps[-1].t + 0.1)
    assert "no step" in next(line for line in shown.splitlines() if line.startswith("   2"))
    assert shown.count("no step") == 1


@pytest.mark.parametrize("script", [False, True])
def test_without_a_panel_a_missing_worker_is_said_a_few_times_and_that_steps_go_on(steps, script):
    progress, now = _running(steps, total=1000, lines=True, script=script)
    last = steps[-1].t
    said = []
    for second in range(1, 100):
        awaited = [_awaited(last + second, last, 1)] if second % 2 else []
        said += progress.take(awaited, now + second)
    assert said == [
        f"no step for {time}: rank 1 is missing" for time in ("5 s", "10 s", "20 s", "40 s", "1 min 20 s")
    ]
    after = progress.take([_again(step, 100) for step in steps], now + 100)
    assert after[:1] == ["steps go on"]
    assert progress.take([], now + 101) == []


def test_without_a_panel_silence_alone_is_not_a_line_in_a_log(steps):
    progress, now = _running(steps, total=1000, lines=True, script=True)
    assert [line for second in range(1, 100) for line in progress.take([], now + second)] == []


def test_run_that_has_ended_is_not_stalled(steps):
    progress, now = _running(steps, total=1000, lines=True)
    progress.take([_awaited(9.0, 0.0, 1)], now + 9)
    progress.take([RunEnded(t=9.5, rank=-1, outcome="failed")], now + 9)
    assert progress.take([], now + 12) == []
    assert "no step" not in _shown(progress, now + 12)


@pytest.mark.parametrize(("height", "rows"), [(5, 0), (6, 1), (7, 2), (8, 4)])
def test_panel_has_as_many_workers_as_there_is_room_for(steps, height, rows):
    progress, now = _running(steps, total=1000, script=True)
    shown = _shown(progress, now + 1, height=height).splitlines()
    assert len(shown) <= height
    assert sum(line.startswith("   ") for line in shown) == rows


# Notes and warnings


def _note(rank: int, text: str, *, warning: bool = False) -> Noted:
    return Noted(t=1.0, rank=rank, text=text, warning=warning)


def test_note_of_any_worker_is_said_at_once_and_once():
    progress = Progress(0.0, lines=False, script=True)
    assert progress.take([_note(2, "falls back"), _note(0, "falls back")], 0.0) == ["note: falls back"]
    assert progress.take([_note(1, "falls back")], 9.0) == []


def test_warning_of_the_leader_is_left_to_its_output_where_that_is_shown():
    told = [_note(0, "odd", warning=True), _note(0, "odd")]
    assert Progress(0.0, lines=False, script=True).take(told, 0.0) == []
    assert Progress(0.0, lines=False).take(told, 0.0) == ["warning: odd"]


def test_warning_of_another_worker_is_said_with_its_rank():
    progress = Progress(0.0, lines=False, script=True)
    assert progress.take([_note(2, "odd", warning=True), _note(2, "odd")], 0.0) == []
    assert progress.take([_note(1, "odd", warning=True)], 0.4) == []
    assert progress.take([], 0.6) == ["warning of rank 2: odd"]
    assert progress.take([_note(1, "odd", warning=True), _note(1, "odd")], 9.0) == []


def test_warning_that_the_leader_prints_too_is_not_said_again():
    progress = Progress(0.0, lines=False, script=True)
    assert progress.take([_note(2, "odd", warning=True)], 0.0) == []
    assert progress.take([_note(0, "odd", warning=True)], 0.3) == []
    assert progress.take([], 9.0) == []
    assert progress.end() == []


def test_warning_at_the_very_end_is_not_lost():
    progress = Progress(0.0, lines=False, script=True)
    progress.take([_note(3, "drifted apart", warning=True)], 0.0)
    assert progress.end() == ["warning of rank 3: drifted apart"]


def test_fault_is_said():
    fault = FaultInjected(t=1.0, rank=-1, action="kill", target="node-b", detail="")
    assert Progress(0.0, lines=False, script=True).take([fault], 0.0) == ["fault: kill node-b"]
