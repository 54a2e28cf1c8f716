"""Shows a run in the terminal: a live display or plain lines, and a closing table.

On a terminal there is one display, redrawn in place: a bar for the whole run and a row per worker.
Elsewhere (a file, a pipe, a CI log) there is a line at each evaluation or epoch, and every ten seconds.
Live figures are those of the last seconds; the closing table has those of the whole run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echelon.config.units import show_bytes, show_seconds
from echelon.observe.events import (
    LAUNCHER,
    AnyEvent,
    EpochEnded,
    Evaluated,
    FaultInjected,
    Noted,
    StepEnded,
    StepsExpected,
)
from echelon.observe.summary import Summary, Tally, WorkerSummary
from echelon.observe.sync import SyncFigures
from echelon.observe.verdict import verdict, wire_verdict

_REDRAW_EVERY_S = 0.1
_LINE_EVERY_S = 10.0
_RECENT_S = 5.0
_BAR_WIDTH = 24
_PENDING_ROUNDS = 1000
_AROUND_TABLE = 8  # lines of the display that are not workers
_LEGEND = {  # of the closing table's columns
    "wait": "for other workers and for transfers",
    "last": "share of rounds in which the worker arrived last",
    "delayed": "how long the worker kept the others waiting",
    "dropped": "gradients that the server did not apply",
    "took part": "share of updates that contain a push of the worker",
    "age": "updates between reading weights and applying the gradient, on average",
    "held": "how long the policy made the worker wait",
}


class Progress:
    """The display of one run. Call `update` often, also without events; it limits how often it draws.

    `total_steps` is the number of steps after which the run will end, if known; an event may set it later.
    If workers do not step together, the steps of all workers are counted, and the total is multiplied by
    the number of workers, because each worker's own number is not known. Epochs are counted from 0 in
    events and shown from 1. Print other output through `console`, so that it does not break the display.
    The launcher prints its own notes itself.
    """

    def __init__(
        self,
        total_steps: int | None = None,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console if console is not None else Console()
        self._total_steps = total_steps
        self._clock = clock
        self._tally = Tally(limit=_PENDING_ROUNDS)
        self._recent: deque[tuple[float, Summary]] = deque()
        self._done = 0
        self._done_by: dict[int, int] = {}
        self._epoch: int | None = None
        self._ended_epoch: int | None = None
        self._printed: set[object] = set()
        self._drawn_at = self._clock()
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        else:
            self._epoch_line()

    @property
    def summary(self) -> Summary:
        """The figures of the whole run so far."""
        return self._tally.summary()

    def update(self, events: Iterable[AnyEvent]) -> None:
        """Take new events into account, and draw if enough time has passed."""
        for event in events:
            if isinstance(event, StepEnded):
                self._step(event)
            self._tally.add(event)
            self._announce(event)
        every_s = _LINE_EVERY_S if self._live is None else _REDRAW_EVERY_S
        now = self._clock()
        if now - self._drawn_at < every_s:
            return
        self._drawn_at = now
        self._draw(now)

    def _step(self, event: StepEnded) -> None:
        self._done = max(self._done, event.step + 1)
        self._done_by[event.rank] = max(self._done_by.get(event.rank, 0), event.step + 1)
        if self._epoch is None or event.epoch > self._epoch:
            self._epoch_line()
            self._epoch = event.epoch

    def _draw(self, now: float) -> None:
        summary = self._tally.summary()
        before = self._look_back(now, summary)
        if self._live is not None:
            parts = [self._top(summary), *_middle(summary, before, self.console)]
            self._live.update(Group(*parts), refresh=True)
        elif summary.steps:
            self._line(self._position(summary), summary, before)

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

    def _top(self, summary: Summary) -> RenderableType:
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
            left = f"{show_seconds(max(0, total - done) * summary.seconds / made)} left" if made else ""
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

    def _announce(self, event: AnyEvent) -> None:
        """Print a note, a fault or an evaluation on its own line, once even if all workers report it."""
        match event:
            case Noted() if event.rank != LAUNCHER and event.text not in self._printed:
                self._printed.add(event.text)
                self._say(f"note: {event.text}")
            case StepsExpected():
                self._total_steps = event.steps
            case FaultInjected():
                self._say(f"fault: {event.detail or f'{event.action} {event.target}'}")
            case EpochEnded() if ("epoch", event.epoch) not in self._printed:
                self._ended_epoch = event.epoch
            case Evaluated() if self._live is None and (event.epoch, event.step) not in self._printed:
                self._printed |= {(event.epoch, event.step), ("epoch", event.epoch)}
                self._ended_epoch = None
                self._drawn_at = self._clock()
                self._line(f"epoch {event.epoch + 1} evaluated", self._tally.summary(), None)
            case _:
                pass

    def _epoch_line(self) -> None:
        """Print the line of an epoch that ended without an evaluation."""
        epoch, self._ended_epoch = self._ended_epoch, None
        if epoch is None or self._live is not None:
            return
        self._printed.add(("epoch", epoch))
        self._line(f"epoch {epoch + 1} ended", self._tally.summary(), None)

    def _line(self, beginning: str, summary: Summary, before: Summary | None) -> None:
        self._say(", ".join([beginning, *_figures(summary, before)]))

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


def _figures(summary: Summary, before: Summary | None) -> list[str]:
    figures = [f"{_rate(summary, before):,.0f} samples/s"]
    if summary.train_loss is not None:
        figures.append(f"loss {summary.train_loss:.4g}")
    if summary.test_loss is not None:
        figures.append(f"test loss {summary.test_loss:.4g}")
    if summary.accuracy is not None:
        figures.append(f"accuracy {100 * summary.accuracy:.1f} %")
    return figures


def _rate(summary: Summary, before: Summary | None) -> float:
    if before is None or summary.seconds <= before.seconds:
        return summary.samples_per_s
    return (summary.samples - before.samples) / (summary.seconds - before.seconds)


def _middle(summary: Summary, before: Summary | None, console: Console) -> list[RenderableType]:
    if not summary.steps:
        return [Text("waiting for the first step", style="dim")]
    return [
        Text("  ".join(_figures(summary, before))),
        Text(),
        _worker_table(summary, before, console),
    ]


def _worker_table(summary: Summary, before: Summary | None, console: Console) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("node", no_wrap=True, max_width=16)
    table.add_column("share", justify="right")
    table.add_column("samples/s", justify="right")
    table.add_column("compute and wait", width=_BAR_WIDTH, no_wrap=True)
    together = summary.sync is None
    table.add_column("last" if together else "steps", justify="right")
    earlier = {worker.rank: worker for worker in before.workers} if before is not None else {}
    room = max(1, console.height - _AROUND_TABLE)
    for worker in summary.workers[:room]:
        then = earlier.get(worker.rank)
        table.add_row(
            str(worker.rank),
            worker.node,
            f"{worker.mean_share:.0f}",
            f"{_worker_rate(worker, then):,.0f}",
            _activity_bar(worker, then, ascii_only=console.options.ascii_only),
            _percent(worker.times_last, summary.rounds) if together else f"{worker.steps:,}",
        )
    if len(summary.workers) <= room:
        return table
    return Group(table, Text(f"and {len(summary.workers) - room} more workers", style="dim"))


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


def closing_table(summary: Summary) -> RenderableType:
    """The figures of a run that has ended; fits 80 columns."""
    if not summary.steps:
        return Text(verdict(summary))
    table = Table(box=box.SIMPLE, show_footer=True, padding=(0, 0, 0, 1), footer_style="bold")
    columns = _columns(summary)
    for name, (total, *_) in columns.items():
        if name == "node":  # the only column that may fold in a narrow terminal
            table.add_column(name, total, overflow="fold")
        else:
            table.add_column(name, total, justify="right", no_wrap=True)
    for row in range(len(summary.workers)):
        table.add_row(*(Text(cells[row + 1]) for cells in columns.values()))
    rate, *quality = _figures(summary, None)
    lines = [f"{_made(summary)} in {show_seconds(summary.seconds)}, {rate}", ", ".join(quality)]
    lines += [verdict(summary), wire_verdict(summary)]
    known = [f"{name}: {meaning}" for name, meaning in _LEGEND.items() if name in columns]
    texts = [Text("; ".join(known), style="dim")] if summary.world_size > 1 else []
    return Group(table, *texts, *(Text(line) for line in lines if line))


def _made(summary: Summary) -> str:
    if summary.sync is None:
        return f"{summary.steps:,} steps"
    updates = f" and {summary.sync.updates:,} updates" if summary.sync.served else ""
    return f"{summary.all_steps:,} steps of {len(summary.workers)} workers{updates}"


def _columns(summary: Summary) -> dict[str, list[str]]:
    """The closing table by column: the figure for all workers, then each worker's."""
    workers = summary.workers
    columns = {
        "rank": ["all", *(str(w.rank) for w in workers)],
        "node": ["", *(w.node for w in workers)],
    }
    if summary.sync is None:
        batch = sum(w.mean_share for w in workers)
        columns["share"] = [f"{batch:.0f}", *(f"{w.mean_share:.0f}" for w in workers)]
    else:
        columns["steps"] = [f"{summary.all_steps:,}", *(f"{w.steps:,}" for w in workers)]
    columns |= {
        "samples/s": [f"{summary.samples_per_s:,.0f}", *(f"{w.samples_per_s:,.0f}" for w in workers)],
        "compute": ["", *(_seconds(w.compute_s, summary) for w in workers)],
        "wait": ["", *(_seconds(w.wait_s, summary) for w in workers)],
    }
    if not (summary.sync and summary.sync.served):  # with a server, other columns need the room
        sent_bytes = [sum(w.sent_bytes for w in workers), *(w.sent_bytes for w in workers)]
        columns["sent"] = [show_bytes(count) for count in sent_bytes]
    if summary.rounds > 0:
        columns |= {
            "last": ["", *(_percent(w.times_last, summary.rounds) for w in workers)],
            "delayed": [
                _seconds(summary.spread_s, summary),
                *(_seconds(w.held_up_s, summary) for w in workers),
            ],
        }
    if summary.sync is not None and summary.sync.served:
        columns |= _sync_columns(summary, summary.sync)
    return columns


def _sync_columns(summary: Summary, sync: SyncFigures) -> dict[str, list[str]]:
    """What happened to each worker's pushes; columns that would be all zeros are left out."""
    known = {worker.rank: worker for worker in sync.workers}
    own = [known.get(worker.rank) for worker in summary.workers]
    columns = {}
    if sync.dropped:
        columns["dropped"] = [f"{sync.dropped:,}", *(f"{w.dropped:,}" if w else "" for w in own)]
    if any(worker.alone for worker in sync.workers):
        columns["took part"] = ["", *(_percent(w.took_part, 1.0) if w else "" for w in own)]
    if sync.age_most:
        columns["age"] = [f"{sync.age_mean:.1f}", *(f"{w.age_mean:.1f}" if w else "" for w in own)]
    return columns | {"held": ["", *(_seconds(w.held_s, summary) if w else "" for w in own)]}


def _seconds(seconds: float, summary: Summary) -> str:
    """Always in seconds, so that the figures of a column can be compared at a glance."""
    return f"{seconds:,.2f} s" if summary.seconds < 100 else f"{seconds:,.0f} s"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""
