"""What is shown of a run while it goes on. Pure: events and a clock in, sentences and a panel out.

Sentences are said once: notes, warnings, faults, and, where there is no panel, a line at each evaluation or
epoch and every ten seconds. The panel is for the bottom of a terminal: a bar for the whole run and a row
per worker. Its figures are those of the last seconds. If no step ends, both say so, and promise nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_seconds
from echelon.observe.closing import percent, quality, rate
from echelon.observe.events import (
    LAUNCHER,
    AnyEvent,
    CorruptionFound,
    EpochEnded,
    Evaluated,
    FaultInjected,
    Noted,
    QuotasApplied,
    RunEnded,
    StepEnded,
    StepsExpected,
)
from echelon.observe.stall import Stall, StallWatch
from echelon.observe.summary import Summary, Tally
from echelon.observe.worker_figures import WorkerSummary

_LINE_EVERY_S = 10.0
_RECENT_S = 5.0
_HELD_S = 0.5
_STALL_S = 5.0
_BAR_WIDTH = 24
_PENDING_ROUNDS = 1000
_AROUND_WORKERS = 4  # lines of the panel that are not workers: position, figures, a line between, headings


class Progress:
    """Follows one run. Call `take` often, also without events; `now` is any clock, in seconds.

    lines   there is no panel: say how training goes on, in lines
    script  the leader's output is shown too: it has the leader's own warnings, and the script says itself
            how training goes on; the panel is divided from it by a line

    If workers do not step together, the steps of all workers are counted, and the total is multiplied by
    the number of workers, because each worker's own number is not known. Epochs are counted from 0 in
    events and shown from 1. The launcher says its own notes itself.
    """

    def __init__(self, now: float, *, lines: bool, script: bool = False) -> None:
        self._lines = lines
        self._script = script
        self._counts = not (lines and script)  # otherwise no figure is shown, and counting takes time
        self._total_steps: int | None = None
        self._tally = Tally(limit=_PENDING_ROUNDS)
        self._recent: deque[tuple[float, Summary]] = deque()
        self._stalls = StallWatch()
        self._stall_said_s = 0.0
        self._done = 0
        self._done_by: dict[int, int] = {}
        self._epoch: int | None = None
        self._ended_epoch: int | None = None
        self._said: set[object] = set()
        self._held: dict[str, tuple[float, str]] = {}
        self._line_at = now
        self._over = False

    def take(self, events: Iterable[AnyEvent], now: float) -> list[str]:
        """Take new events into account. Returns the sentences that are due."""
        due: list[str] = []
        for event in events:
            if isinstance(event, StepEnded):
                due += self._step(event)
            if self._counts:
                self._tally.add(event)
            self._stalls.take(event, now)
            due += self._announce(event, now)
        due += self._release(now)
        return due + self._about_stall(now) + self._periodically(now)

    def end(self) -> list[str]:
        """The last sentences."""
        return self._release(math.inf) + self._epoch_line()

    # Sentences -----------------------------------------------------------------------------------

    def _step(self, event: StepEnded) -> list[str]:
        self._done = max(self._done, event.step + 1)
        self._done_by[event.rank] = max(self._done_by.get(event.rank, 0), event.step + 1)
        if self._epoch is not None and event.epoch <= self._epoch:
            return []
        self._epoch = event.epoch
        return self._epoch_line()

    def _announce(self, event: AnyEvent, now: float) -> list[str]:
        """What is said of an event, once even if all workers report it."""
        match event:
            case Noted() if event.rank != LAUNCHER and event.text not in self._said:
                return self._note(event, now)
            case Noted() if event.rank == LAUNCHER and event.warning:  # its notes were shown at the start
                return [f"warning: {event.text}"]
            case CorruptionFound() if not self._script:  # a script's workers have printed it
                return [f"warning: {event.text}"]
            case QuotasApplied() if event.quotas:
                return [f"CPU quotas are in force: {event.reason}"]
            case StepsExpected():
                self._total_steps = event.steps
            case FaultInjected():
                return [f"fault: {event.detail or f'{event.action} {event.target}'}"]
            case RunEnded():
                self._over = True
            case EpochEnded() if ("epoch", event.epoch) not in self._said:
                self._ended_epoch = event.epoch
            case Evaluated() if (event.epoch, event.step) not in self._said:
                self._said |= {(event.epoch, event.step), ("epoch", event.epoch)}
                self._ended_epoch = None
                self._line_at = now
                return self._line(f"epoch {event.epoch + 1} evaluated")
            case _:
                pass
        return []

    def _note(self, event: Noted, now: float) -> list[str]:
        """A note is said at once. Another worker's warning waits a moment: the leader may print it, too."""
        if event.warning and event.rank > 0:
            warning = f"warning of rank {event.rank}: {event.text}"
            self._held.setdefault(event.text, (now + _HELD_S, warning))
            return []
        if event.text in self._held and not event.warning:
            return []
        self._held.pop(event.text, None)
        self._said.add(event.text)
        if event.warning and self._script:
            return []
        return [f"{'warning' if event.warning else 'note'}: {event.text}"]

    def _release(self, now: float) -> list[str]:
        """The warnings that have waited long enough."""
        due = [text for text, (at, _) in self._held.items() if now >= at]
        self._said |= set(due)
        return [self._held.pop(text)[1] for text in due]

    def _periodically(self, now: float) -> list[str]:
        if now - self._line_at < _LINE_EVERY_S or not self._lines or self._script:
            return []
        self._line_at = now
        summary = self._tally.summary()
        before = self._look_back(now, summary)
        if not summary.steps or self._stalls.look(now) is not None:
            return []
        return self._line(self._position(summary), before)

    def _about_stall(self, now: float) -> list[str]:
        """Without a panel: who is missing, after seconds and at each doubling, and that steps go on."""
        stall = None if self._over or not self._lines else self._stalls.look(now)
        if stall is None:
            said_s, self._stall_said_s = self._stall_said_s, 0.0
            return ["steps go on"] if said_s and not self._over else []
        if stall.seconds < max(_STALL_S, 2 * self._stall_said_s) or not (stall.missing or stall.doing):
            return []
        self._stall_said_s = stall.seconds
        return [str(stall)]

    def _epoch_line(self) -> list[str]:
        """The line of an epoch that ended without an evaluation."""
        epoch, self._ended_epoch = self._ended_epoch, None
        if epoch is None:
            return []
        self._said.add(("epoch", epoch))
        return self._line(f"epoch {epoch + 1} ended")

    def _line(self, beginning: str, before: Summary | None = None) -> list[str]:
        if not self._lines or self._script:
            return []
        summary = self._tally.summary()
        return [", ".join([beginning, _rate(summary, before), *quality(summary)])]

    # The panel -----------------------------------------------------------------------------------

    def panel(self, now: float, *, height: int, ascii_only: bool = False) -> RenderableType | None:
        """What is to be seen now, in at most `height` lines; None if there is nothing to see."""
        summary = self._tally.summary()
        before = self._look_back(now, summary)
        stall = None if self._is_complete(summary) else self._stalls.look(now)
        if not summary.steps:
            waits = Text(str(stall), style="yellow") if stall else Text("waiting for the first step", "dim")
            return waits if stall or not self._script else None
        if stall is None:
            figures = [_rate(summary, before), *quality(summary)]
            news = Text("  ".join(figures))
        else:
            news = Text(str(stall), style="yellow" if stall.missing or stall.doing else "dim")
        room = height - _AROUND_WORKERS
        fits = room > 1 or (room == 1 and len(summary.workers) == 1)
        table = [self._workers(summary, before, now, room, ascii_only, stall)] if fits else []
        between = Rule(style="dim", characters="-" if ascii_only else "─")
        parts = [self._top(summary, stall), news]
        return Group(*([between, *parts, *table] if self._script else [*parts, Text(), *table]))

    def _is_complete(self, summary: Summary) -> bool:
        done, total = self._steps_done(summary)
        return self._over or (total is not None and done >= total)

    def _position(self, summary: Summary) -> str:
        in_epoch = f" (epoch {self._epoch + 1})" if self._epoch is not None else ""
        done, total = self._steps_done(summary)
        if summary.sync is None:
            of_all = f" of {total}" if total is not None else ""
            return f"step {done}{of_all}{in_epoch}"
        about = f" of about {total:,}" if total is not None and done <= total else ""
        return f"{done:,}{about} steps of {summary.world_size} workers{in_epoch}"

    def _steps_done(self, summary: Summary) -> tuple[int, int | None]:
        """Steps done and steps in total: of one worker if all step together, else of all workers."""
        if summary.sync is None:
            return self._done, self._total_steps
        total = None if self._total_steps is None else self._total_steps * summary.world_size
        return sum(self._done_by.values()), total

    def _top(self, summary: Summary, stall: Stall | None) -> RenderableType:
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(justify="right", no_wrap=True)
        bar: RenderableType = ""
        left = ""
        done, total = self._steps_done(summary)
        if total:
            bar = ProgressBar(total=total, completed=min(done, total))
            made = summary.steps if summary.sync is None else summary.all_steps
            if made and done < total and stall is None:
                left = f"{show_seconds((total - done) * summary.seconds / made)} left"
        top.add_row(self._position(summary), bar, left)
        return top

    def _look_back(self, now: float, summary: Summary) -> Summary | None:
        """The figures of some seconds ago; live figures are the difference from them to now."""
        before = self._recent[0][1] if self._recent else None
        if not self._recent or now - self._recent[-1][0] >= _RECENT_S / 5:
            self._recent.append((now, summary))
        while len(self._recent) > 1 and now - self._recent[1][0] >= _RECENT_S:
            self._recent.popleft()
        return before

    def _workers(
        self,
        summary: Summary,
        before: Summary | None,
        now: float,
        room: int,
        ascii_only: bool,
        stall: Stall | None,
    ) -> RenderableType:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("rank", justify="right")
        table.add_column("node", no_wrap=True, max_width=16)
        table.add_column("share", justify="right")
        table.add_column("samples/s", justify="right")
        table.add_column("compute and wait", width=_BAR_WIDTH, no_wrap=True)
        together = summary.sync is None
        table.add_column("last" if together else "steps", justify="right")
        earlier = {worker.rank: worker for worker in before.workers} if before is not None else {}
        if len(summary.workers) > room:
            room -= 1  # the line that counts the others
        for worker in summary.workers[:room]:
            then = earlier.get(worker.rank)
            behind_s = 0.0 if stall else self._stalls.silence_s(worker.rank, now)
            if behind_s:
                does = Text(str(Stall(seconds=behind_s)), style="yellow")
            else:
                does = Text() if stall else _activity_bar(worker, then, ascii_only=ascii_only)
            table.add_row(
                str(worker.rank),
                worker.node,
                f"{worker.mean_share:.0f}",
                "" if stall or behind_s else f"{_worker_rate(worker, then):,.0f}",
                does,
                percent(worker.times_last, summary.rounds) if together else f"{worker.steps:,}",
            )
        if len(summary.workers) <= room:
            return table
        return Group(table, Text(f"and {len(summary.workers) - room} more workers", style="dim"))


def _rate(summary: Summary, before: Summary | None) -> str:
    if not summary.samples or before is None or summary.seconds <= before.seconds:
        return rate(summary)
    return f"{(summary.samples - before.samples) / (summary.seconds - before.seconds):,.0f} samples/s"


def _worker_rate(worker: WorkerSummary, then: WorkerSummary | None) -> float:
    if then is None or worker.step_s <= then.step_s:
        return worker.samples_per_s
    return (worker.samples - then.samples) / (worker.step_s - then.step_s)


def _activity_bar(worker: WorkerSummary, then: WorkerSummary | None, *, ascii_only: bool) -> Text:
    """A bar of a worker's time: computing solid, waiting pale, the rest blank."""
    if then is None or worker.step_s <= then.step_s:
        compute_s, wait_s, step_s = worker.compute_s, worker.wait_s, worker.step_s
    else:
        compute_s = worker.compute_s - then.compute_s
        wait_s = worker.wait_s - then.wait_s
        step_s = worker.step_s - then.step_s
    if step_s <= 0:
        return Text()
    computing = min(_BAR_WIDTH, round(_BAR_WIDTH * compute_s / step_s))
    waiting = min(_BAR_WIDTH - computing, round(_BAR_WIDTH * wait_s / step_s))
    solid, pale = ("#", ".") if ascii_only else ("█", "░")
    return Text.assemble((solid * computing, "blue"), (pale * waiting, "yellow"))
