"""Collects a run's curves and incidents from its events, in one pass.

Times are seconds since the first step began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from echelon.observe.arrival import ObservedRound, RoundTally, judge
from echelon.observe.events import (
    AnyEvent,
    CheckpointLoaded,
    CheckpointSaved,
    CorruptionFound,
    Evaluated,
    FaultInjected,
    Logged,
    Noted,
    QuotasApplied,
    RunEnded,
    RunStarted,
    StepEnded,
    WorkerFailed,
)
from echelon.observe.page.scale import Point
from echelon.observe.summary import Summary, Tally
from echelon.observe.sync import Stretch


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPoint:
    """One step of the run; `spread_s` and `last` are None unless all of several workers reported it.

    If workers do not step together, it is one worker's step.
    """

    step: int
    epoch: int
    begin_s: float
    end_s: float
    samples: int
    loss: float | None
    spread_s: float | None = None
    last: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """A fault, failure, note, checkpoint or end of the run, and the worker that reported it."""

    at_s: float
    kind: str
    rank: int
    text: str


@dataclass(slots=True)
class LoggedValue:
    """The values that the script logged under one name."""

    times: int = 0
    last: float = math.nan
    least: float = math.inf
    most: float = -math.inf


@dataclass(kw_only=True, slots=True)
class RunHistory:
    """What the page shows. `began` is the first event's time, None without events.

    `first_step` is when the first step began; `began` if there was none.
    """

    summary: Summary
    began: float | None
    first_step: float = 0.0
    run: str = ""
    command: str = ""
    rounds: list[RoundPoint] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    logged: dict[str, LoggedValue] = field(default_factory=dict)
    course: tuple[Stretch, ...] = ()

    @property
    def together(self) -> bool:
        """Whether all workers take every step together."""
        return self.summary.sync is None


class _Collector:
    def __init__(self, policy: str) -> None:
        self.tally = Tally(policy=policy)
        self.steps: list[RoundPoint] = []  # one by one, if workers do not step together
        self.open_rounds = RoundTally()
        self.world_size: int | None = None
        self.began = self.first_step = math.inf
        self.started: RunStarted | None = None
        self.rounds: list[tuple[RoundPoint, RoundPoint]] = []  # judged by arrival, judged by waiting
        self.evaluations: dict[tuple[int, int], Evaluated] = {}
        self.incidents: dict[tuple[str, str, float], Incident] = {}
        self.saved: list[CheckpointSaved] = []
        self.logged: dict[str, LoggedValue] = {}

    def add(self, event: AnyEvent) -> None:
        self.tally.add(event)
        self.began = min(self.began, event.start if isinstance(event, StepEnded) else event.t)
        match event:
            case StepEnded():
                self.first_step = min(self.first_step, event.start)
                if self.tally.apart:
                    self.steps.append(_point(ObservedRound(event.step, {event.rank: event})))
                    return
                complete = self.open_rounds.add(event, self.world_size)
                if complete is not None:
                    self._round(complete, judged=len(complete.workers) > 1)
            case RunStarted():
                self.started, self.world_size = event, event.world_size
            case Evaluated():
                self.evaluations[event.epoch, event.step] = event
            case Logged():
                self._log(event)
            case CheckpointSaved():
                self.saved.append(event)
            case _:
                self._incident(event)

    def _round(self, round_: ObservedRound, *, judged: bool) -> None:
        point = _point(round_)
        if not judged:
            self.rounds.append((point, point))
            return
        one, other = judge(round_), judge(round_, "wait")
        self.rounds.append(
            (
                replace(point, spread_s=one.spread_s, last=one.last),
                replace(point, spread_s=other.spread_s, last=other.last),
            )
        )

    def _incident(self, event: AnyEvent) -> None:
        described = _in_words(event)
        if described is None:
            return
        kind, text = described
        # Every worker reports the same note, but two reports of a fault are two faults.
        once = event.t if kind == "fault" else 0.0
        self.incidents.setdefault(
            (kind, text, once), Incident(at_s=event.t, kind=kind, rank=event.rank, text=text)
        )

    def _saved(self) -> list[Incident]:
        if not self.saved:
            return []
        last = max(self.saved, key=lambda saved: saved.step)
        text = f"{len(self.saved):,} saved, the last at step {last.step:,}: {last.path}"
        return [Incident(at_s=last.t, kind="checkpoint", rank=last.rank, text=text)]

    def _log(self, event: Logged) -> None:
        for name, value in event.values.items():
            known = self.logged.setdefault(name, LoggedValue())
            known.times += 1
            known.last = value
            known.least, known.most = min(known.least, value), max(known.most, value)

    def history(self) -> RunHistory:
        summary = self.tally.summary()
        zero = self.zero
        return RunHistory(
            summary=summary,
            began=self.began if math.isfinite(self.began) else None,
            first_step=zero,
            run=self.started.run if self.started else "",
            command=_command(self.started.command) if self.started else "",
            rounds=self._points(summary),
            evaluations=[self.evaluations[key] for key in sorted(self.evaluations)],
            incidents=sorted(
                (replace(i, at_s=i.at_s - zero) for i in [*self.incidents.values(), *self._saved()]),
                key=lambda i: i.at_s,
            ),
            logged=self.logged,
            course=self.tally.course(),
        )

    def _points(self, summary: Summary) -> list[RoundPoint]:
        if summary.sync is not None:
            # A few steps may have come before the policy was known.
            early = [r for r in self.open_rounds.incomplete() for r in _one_by_one(r)]
            points = sorted([*map(_point, early), *self.steps], key=lambda p: p.end_s)
        else:
            everyone = max(2, summary.world_size)
            for round_ in self.open_rounds.incomplete():
                self._round(round_, judged=len(round_.workers) >= everyone)
            points = [one if summary.judged_by == "arrival" else other for one, other in self.rounds]
            points.sort(key=lambda p: (p.step, p.end_s))
        return [replace(p, begin_s=p.begin_s - self.zero, end_s=p.end_s - self.zero) for p in points]

    @property
    def zero(self) -> float:
        """The time that all others are counted from."""
        return self.first_step if math.isfinite(self.first_step) else self.began


def _command(words: Sequence[str]) -> str:
    """The command line as a user would type it, without the path of Echelon's own program."""
    program, *arguments = words or ("",)
    path = Path(program)
    if path.name == "__main__.py":
        program = f"python -m {path.parent.name}"
    elif path.name == "echelon":
        program = "echelon"
    return " ".join([program, *arguments])


def _one_by_one(round_: ObservedRound) -> list[ObservedRound]:
    return [ObservedRound(round_.step, {rank: step}) for rank, step in round_.workers.items()]


def collect_history(events: Iterable[AnyEvent], policy: str = "") -> RunHistory:
    """Collect what the page shows; `policy` as for `Tally`."""
    collector = _Collector(policy)
    for event in events:
        collector.add(event)
    return collector.history()


def _point(round_: ObservedRound) -> RoundPoint:
    return RoundPoint(
        step=round_.step,
        epoch=next(iter(round_.workers.values())).epoch,
        begin_s=round_.begin,
        end_s=round_.end,
        samples=round_.samples,
        loss=round_.loss,
    )


def _in_words(event: AnyEvent) -> tuple[str, str] | None:
    match event:
        case FaultInjected():
            return "fault", event.detail or f"{event.action} {event.target}"
        case QuotasApplied() if event.quotas:
            return "lab", f"CPU quotas are in force: {event.reason}"
        case WorkerFailed():
            node = f" ({event.node})" if event.node else ""
            return "failure", f"rank {event.failed}{node}: {event.cause}"
        case CorruptionFound():
            return "corruption", event.text
        case Noted():
            return "note", event.text
        case CheckpointLoaded():
            unusable = "; ".join(f"could not use {path}: {why}" for path, why in event.rejected.items())
            return "checkpoint", f"continued from {event.path}" + (f"; {unusable}" if unusable else "")
        case RunEnded():
            return "end", event.outcome + (f": {event.detail}" if event.detail else "")
        case _:
            return None


def throughput(rounds: Sequence[RoundPoint], most: int = 150) -> list[Point]:
    """Samples per second in stretches of equal length; a round's samples are spread over its duration."""
    if not rounds:
        return []
    begin = min(point.begin_s for point in rounds)
    end = max(point.end_s for point in rounds)
    if end <= begin:
        return []
    count = max(1, min(most, len(rounds) // 3))
    width = (end - begin) / count
    samples = [0.0] * count
    for point in rounds:
        _distribute(point, begin, width, samples)
    return [(begin + (index + 0.5) * width, count / width) for index, count in enumerate(samples)]


def _distribute(point: RoundPoint, begin: float, width: float, into: list[float]) -> None:
    last_place = len(into) - 1
    first = min(last_place, max(0, int((point.begin_s - begin) / width)))
    final = min(last_place, max(first, int((point.end_s - begin) / width)))
    length = point.end_s - point.begin_s
    if first == final or length <= 0:
        into[final] += point.samples
        return
    left = float(point.samples)
    for place in range(first, final):
        until = begin + (place + 1) * width
        part = point.samples * (until - max(point.begin_s, begin + place * width)) / length
        into[place] += part
        left -= part
    into[final] += left


def middle_steps(rounds: Sequence[RoundPoint], count: int = 4) -> tuple[int, ...]:
    """Consecutive steps near the run's middle, of one epoch and reported by all workers if possible."""
    judged = [point for point in rounds if point.spread_s is not None] or list(rounds)
    for wanted in range(min(count, len(judged)), 0, -1):
        windows = [judged[at : at + wanted] for at in range(len(judged) - wanted + 1)]
        whole = [w for w in windows if w[-1].step - w[0].step == wanted - 1 and w[0].epoch == w[-1].epoch]
        if whole:
            middle = (judged[0].step + judged[-1].step) / 2
            best = min(whole, key=lambda w: abs((w[0].step + w[-1].step) / 2 - middle))
            return tuple(point.step for point in best)
    return ()


def middle_window(steps: Sequence[RoundPoint], count: int = 4) -> tuple[float, float]:
    """A stretch of time as long as a few steps, around the moment when half of all steps had begun."""
    lengths = sorted(point.end_s - point.begin_s for point in steps)
    middle = sorted(point.begin_s for point in steps)[len(steps) // 2]
    half_s = count * lengths[len(lengths) // 2] / 2
    return middle - half_s, middle + half_s
