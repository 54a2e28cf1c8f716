"""The run as a page tells it: curves and happenings, gathered from events in one pass.

Times are seconds since the run began.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from echelon.observe.arrival import ObservedRound, RoundTally, judge
from echelon.observe.events import (
    AnyEvent,
    CheckpointLoaded,
    CheckpointSaved,
    Evaluated,
    FaultInjected,
    Logged,
    Noted,
    RunEnded,
    RunStarted,
    StepEnded,
    WorkerFailed,
)
from echelon.observe.page.scale import Point
from echelon.observe.spans import end_of
from echelon.observe.summary import Summary, Tally
from echelon.observe.sync import Stretch


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPoint:
    """One step of the run; spread and last are unknown unless all of several workers reported it.

    Where workers do not step together it is one worker's step.
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
class Happening:
    """Something that is told in words: what kind, when, which worker said so, what."""

    at_s: float
    kind: str
    rank: int
    text: str


@dataclass(slots=True)
class LoggedValue:
    """What became of one number that the script logged."""

    times: int = 0
    last: float = math.nan
    least: float = math.inf
    most: float = -math.inf


@dataclass(kw_only=True, slots=True)
class Story:
    """What the page shows; `began` is None if there is nothing to show."""

    summary: Summary
    began: float | None
    run: str = ""
    command: str = ""
    rounds: list[RoundPoint] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    happenings: list[Happening] = field(default_factory=list)
    logged: dict[str, LoggedValue] = field(default_factory=dict)
    course: tuple[Stretch, ...] = ()

    @property
    def together(self) -> bool:
        """Whether all workers take every step together."""
        return self.summary.agreement is None


class _Teller:
    def __init__(self, policy: str, firsts: Sequence[int]) -> None:
        self.tally = Tally(policy=policy, firsts=firsts)
        self.steps: list[RoundPoint] = []  # one by one, in case workers do not step together
        self.gathering = RoundTally()
        self.world_size: int | None = None
        self.began = math.inf
        self.started: RunStarted | None = None
        self.rounds: list[tuple[RoundPoint, RoundPoint]] = []  # judged by arrival, and by waiting
        self.evaluations: dict[tuple[int, int], Evaluated] = {}
        self.told: dict[tuple[str, str, float], Happening] = {}
        self.saved: list[CheckpointSaved] = []
        self.logged: dict[str, LoggedValue] = {}

    def add(self, event: AnyEvent) -> None:
        self.tally.add(event)
        self.began = min(self.began, event.start if isinstance(event, StepEnded) else event.t)
        match event:
            case StepEnded():
                if self.tally.apart:
                    self.steps.append(_point(ObservedRound(event.step, {event.rank: event})))
                    return
                complete = self.gathering.add(event, self.world_size)
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
                self._tell(event)

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

    def _tell(self, event: AnyEvent) -> None:
        told = _in_words(event)
        if told is None:
            return
        kind, text = told
        # Workers tell the same note each; a fault told twice happened twice.
        once = event.t if kind == "fault" else 0.0
        self.told.setdefault(
            (kind, text, once), Happening(at_s=event.t, kind=kind, rank=event.rank, text=text)
        )

    def _saved(self) -> list[Happening]:
        if not self.saved:
            return []
        last = max(self.saved, key=lambda saved: saved.step)
        text = f"{len(self.saved):,} saved, the last at step {last.step:,}: {last.path}"
        return [Happening(at_s=last.t, kind="checkpoint", rank=last.rank, text=text)]

    def _log(self, event: Logged) -> None:
        for name, value in event.values.items():
            known = self.logged.setdefault(name, LoggedValue())
            known.times += 1
            known.last = value
            known.least, known.most = min(known.least, value), max(known.most, value)

    def story(self) -> Story:
        summary = self.tally.summary()
        began = self.began
        return Story(
            summary=summary,
            began=began if math.isfinite(began) else None,
            run=self.started.run if self.started else "",
            command=" ".join(self.started.command) if self.started else "",
            rounds=self._points(summary),
            evaluations=[self.evaluations[key] for key in sorted(self.evaluations)],
            happenings=sorted(
                (replace(h, at_s=h.at_s - began) for h in [*self.told.values(), *self._saved()]),
                key=lambda h: h.at_s,
            ),
            logged=self.logged,
            course=self.tally.course(),
        )

    def _points(self, summary: Summary) -> list[RoundPoint]:
        if summary.agreement is not None:
            # A few steps may have come before that was known.
            early = [r for r in self.gathering.rest() for r in _one_by_one(r)]
            points = sorted([*map(_point, early), *self.steps], key=lambda p: p.end_s)
        else:
            everyone = max(2, summary.world_size)
            for round_ in self.gathering.rest():
                self._round(round_, judged=len(round_.workers) >= everyone)
            points = [one if summary.judged_by == "arrival" else other for one, other in self.rounds]
            points.sort(key=lambda p: (p.step, p.end_s))
        began = self.began
        return [replace(p, begin_s=p.begin_s - began, end_s=p.end_s - began) for p in points]


def _one_by_one(round_: ObservedRound) -> list[ObservedRound]:
    return [ObservedRound(round_.step, {rank: step}) for rank, step in round_.workers.items()]


def tell(events: Iterable[AnyEvent], policy: str = "", firsts: Sequence[int] = ()) -> Story:
    """Gather what the page shows; `policy` and `firsts` are what events do not say, as for `Tally`."""
    teller = _Teller(policy, firsts)
    for event in events:
        teller.add(event)
    return teller.story()


def _point(round_: ObservedRound) -> RoundPoint:
    steps = list(round_.workers.values())
    known = [(s.share, s.loss) for s in steps if s.loss is not None and math.isfinite(s.loss)]
    weight = sum(share for share, _ in known)
    return RoundPoint(
        step=round_.step,
        epoch=steps[0].epoch,
        begin_s=min(step.start for step in steps),
        end_s=max(end_of(step) for step in steps),
        samples=sum(step.share for step in steps),
        loss=sum(share * loss for share, loss in known) / weight if weight else None,
    )


def _in_words(event: AnyEvent) -> tuple[str, str] | None:
    match event:
        case FaultInjected():
            return "fault", event.detail or f"{event.action} {event.target}"
        case WorkerFailed():
            node = f" ({event.node})" if event.node else ""
            return "failure", f"rank {event.failed}{node}: {event.cause}"
        case Noted():
            return "note", event.text
        case CheckpointLoaded():
            unusable = "; ".join(f"could not use {path}: {why}" for path, why in event.rejected.items())
            return "checkpoint", f"went on from {event.path}" + (f"; {unusable}" if unusable else "")
        case RunEnded():
            return "end", event.outcome + (f": {event.detail}" if event.detail else "")
        case _:
            return None


def throughput(rounds: Sequence[RoundPoint], most: int = 150) -> list[Point]:
    """Samples per second in equal stretches of time; each round's samples spread over its duration.

    The stretches' rates times their length sum to all samples.
    """
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
        _pour(point, begin, width, samples)
    return [(begin + (index + 0.5) * width, poured / width) for index, poured in enumerate(samples)]


def _pour(point: RoundPoint, begin: float, width: float, into: list[float]) -> None:
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
    """Steps that follow each other, of one epoch if possible, all judged, nearest the run's middle."""
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
    """A stretch of time as long as a few steps, around when half of all steps have begun."""
    lengths = sorted(point.end_s - point.begin_s for point in steps)
    middle = sorted(point.begin_s for point in steps)[len(steps) // 2]
    half_s = count * lengths[len(lengths) // 2] / 2
    return middle - half_s, middle + half_s
