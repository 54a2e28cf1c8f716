from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from echelon.observe.display import Display
from echelon.observe.events import (
    LAUNCHER,
    EpochEnded,
    Evaluated,
    Noted,
    StepEnded,
    StepsExpected,
)
from screen import Screen


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


def _screen(console: Console) -> str:
    """What is to be seen now."""
    screen = Screen(console.width, console.height)
    screen.write(_text(console))
    return "\n".join(screen.lines).rstrip()


def _plain(events, pace_s: float = 0.0, total_steps: int | None = None) -> list[str]:
    console, clock = _console(terminal=False), Clock()
    if total_steps is not None:
        events = [StepsExpected(t=0.0, rank=0, steps=total_steps), *events]
    with Display(console, clock=clock) as display:
        for event in events:
            clock.now += pace_s
            display.update([event])
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
    with Display(console, clock=clock) as display:
        clock.now = 100.0
        display.update([])
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
    with Display(console, clock=clock) as display:
        display.update([])
        clock.now += 1
        display.update(events[:200])
        clock.now += 1
        display.update(events[200:])
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
    with Display(console, clock=clock) as display:
        clock.now += 1
        display.update(imagined())
        assert "step 120" in _screen(console)
    assert _screen(console) == "note: no latency shaping in this kernel"


def test_a_terminal_that_cannot_redraw_gets_plain_lines(imagined):
    console = _console(terminal=True, term="dumb")
    with Display(console) as display:
        display.update(imagined())
    assert "epoch 3 evaluated" in _text(console)
    assert "\x1b" not in _text(console)


def test_the_display_is_not_redrawn_too_often(imagined):
    console, clock = _console(terminal=True), Clock()
    with Display(console, clock=clock) as display:
        clock.now += 1
        display.update(imagined()[:100])
        drawn = len(_text(console))
        clock.now += 0.01
        display.update(imagined()[100:102])
        assert len(_text(console)) == drawn


def test_live_figures_are_those_of_the_last_seconds(imagined, a_plan):
    slow = imagined(a_plan(epochs=1, evaluate=False, speeds=(100.0,) * 4))
    steps = [e for e in slow if isinstance(e, StepEnded)]
    offset = max(e.t for e in steps) - min(e.start for e in steps)
    console, clock = _console(terminal=False), Clock()
    fast = [
        e for e in imagined(a_plan(epochs=1, evaluate=False, speeds=(9e5,) * 4)) if isinstance(e, StepEnded)
    ]
    with Display(console, clock=clock) as display:
        for batch in (steps, []):
            clock.now += 11
            display.update(batch)
        clock.now += 11
        display.update(
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
    with Display(console, clock=clock) as display:
        clock.now += 1
        display.update(imagined(plan))
        assert "and 14 more workers" in _text(console)


def test_if_workers_do_not_step_together_the_steps_of_all_are_counted(imagined_served, a_served_plan):
    events = imagined_served(a_served_plan(need=1, rounds=False, sync="async"))
    lines = _plain(events, pace_s=0.2)
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
    assert _plain(events, pace_s=0.2)[-1].split(",")[0].endswith(" steps of 4 workers (epoch 1)")
    assert "about" not in _plain(events, pace_s=0.2)[-1]
    assert "about 40 steps" in _plain(events, pace_s=0.2)[0]


def test_the_display_of_a_served_run_counts_each_workers_steps(imagined_served):
    console, clock = _console(terminal=True), Clock()
    with Display(console, clock=clock) as display:
        clock.now += 1
        display.update(imagined_served())
        shown = _text(console)
    assert "of about 200 steps of 4 workers" in shown
    assert "last" not in shown


# The script's output


class _Output(io.BytesIO):
    """Where the leader's output is shown: on the console's terminal, or elsewhere."""

    def __init__(self, console: Console | None) -> None:
        super().__init__()
        self._console = console

    def isatty(self) -> bool:
        return self._console is not None

    def write(self, data) -> int:
        if self._console is not None:
            self._console.file.write(bytes(data).decode())
        return super().write(data)


def _scripted(*, terminal: bool = True, elsewhere: bool = False, **options):
    console, clock = _console(terminal=terminal, **options), Clock()
    output = _Output(console if terminal and not elsewhere else None)
    return console, clock, output, Display(console, output=output, clock=clock)


def test_script_output_scrolls_above_the_panel_byte_for_byte(imagined):
    console, clock, output, display = _scripted()
    with display:
        steps = [event for event in imagined() if isinstance(event, StepEnded)]
        for number, event in enumerate(steps[:300]):
            clock.now += 0.2
            display.show_output(b"\r%d" % number if number % 7 else b" done\n")
            display.update([event])
        above, below = _screen(console).split("─" * 80)
        assert [line for line in above.splitlines() if line][-2:] == ["293 done", "299"]
        assert [line.split()[0] for line in below.strip().splitlines()[2:]] == ["rank", "0", "1", "2", "3"]
    assert output.getvalue().startswith(b" done\n\r1\r2\r3\r4\r5\r6 done\n")
    assert "─" not in _screen(console)


def test_sentence_begins_on_a_line_of_its_own_and_an_unfinished_line_is_ended(imagined):
    console, _, _, display = _scripted()
    with display:
        display.show_output(b"10 %")
        display.update([Noted(t=1.0, rank=1, text="falls back")])
        display.show_output(b"\r20 %")
    console.print("the table")
    assert _screen(console).splitlines() == ["10 %", "note: falls back", "20 %", "the table"]


def test_panel_takes_a_third_of_the_terminal(imagined, a_plan):
    plan = a_plan(speeds=(800.0,) * 25, shares=(8,) * 25, nodes=[f"n{i}" for i in range(25)], epochs=1)
    console, clock, _, display = _scripted(height=30)
    with display:
        clock.now += 1
        display.update(imagined(plan))
        _, below = _screen(console).split("─" * 80)
        assert len(below.strip().splitlines()) == 9
        assert "and 20 more workers" in below


def test_script_that_does_not_train_has_no_panel():
    console, clock, _, display = _scripted()
    with display:
        for _ in range(100):
            clock.now += 1
            display.update([])
    assert _text(console) == ""


@pytest.mark.parametrize(("terminal", "elsewhere"), [(False, False), (True, True)])
def test_output_that_is_no_terminal_is_unchanged_and_has_no_panel(imagined, terminal, elsewhere):
    console, clock, output, display = _scripted(terminal=terminal, elsewhere=elsewhere)
    with display:
        display.show_output(b"10 %")
        for event in imagined():
            clock.now += 1
            display.update([event])
        display.show_output(b"\xff\r20 %")
    assert output.getvalue() == b"10 %\xff\r20 %"
    assert _text(console) == "note: no latency shaping in this kernel\n", "the script says how it goes"


def test_ctrl_z_leaves_the_terminal_to_the_shell_and_the_panel_comes_back(imagined, monkeypatch):
    stopped = []
    monkeypatch.setattr(os, "kill", lambda *args: stopped.append((args, _screen(console))))
    before = signal.getsignal(signal.SIGTSTP)
    console, clock, _, display = _scripted()
    with display:
        clock.now += 1
        display.update(imagined())
        signal.raise_signal(signal.SIGTSTP)
        clock.now += 1
        display.update([])
        ((args, shown),) = stopped
        assert args == (os.getpid(), signal.SIGSTOP)
        assert "step 120" not in shown
        assert "step 120" in _screen(console)
    assert signal.getsignal(signal.SIGTSTP) is before
