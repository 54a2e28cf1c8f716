"""Who kept the others waiting, judged by arrival at every place where workers meet.

Time spent in backward or in the reduction does not show it, because the reduction makes all workers as slow
as the slowest. The order of arrival does. Workers meet at the round of a step, and also at exchanges:
statistics of batch normalisation, averages of weights, earlier rounds. Between two consecutive arrivals at
a meeting, the workers that have arrived wait for the missing ones; that time is charged in equal parts to
the missing workers. With arrivals a_1 <= ... <= a_n, the worker that arrived i-th is charged

    sum over k < i of (a_(k+1) - a_k) / (n - k)

So the first worker is charged nothing, a later one never less than an earlier one, and all charges of a
meeting sum to its spread a_n - a_1. (This is the Shapley value of the game whose cost is the latest
arrival.) What the last worker alone could have saved, a_n - a_(n-1), is recorded too. A step's charges are
the sums over its meetings; the step's last worker is the one that is charged most.

Nobody can have waited for late workers longer than it waited at all. So an arrival counts as no earlier
than the last arrival minus the worker's wait. This matters where workers meet only some of the others.

A worker may arrive late because it got the result of the meeting before later than the others. That part
of its charge is kept apart (`late_result_s`): it was woken late, or its link is slower.

Arrivals are times on different machines' clocks. No worker can have a round's result before all have
arrived. If that seems to have happened in most rounds, the clocks disagree. Then meetings are judged by
waiting times, as if each result had reached all workers at the same moment, and `same_clock` corrects the
times that are drawn. (Single such rounds mean little: a worker may be interrupted between sending its last
gradient and noting the time.) Deferred rounds (overlap="step") are always judged by waiting times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal, TypeAlias, TypeVar

import msgspec

from echelon.observe.events import BucketReduced, PassesTimed, StepEnded
from echelon.observe.spans import end_of, exchanges, result_of

Basis: TypeAlias = Literal["arrival", "wait"]
Meeting: TypeAlias = Mapping[int, tuple[float, float]]
"""When each worker arrived at a meeting, and when it had the result; by rank."""

_CLOCK_TOLERANCE_S = 1e-3
_ROUNDING_S = 5e-6
_MOST_UNMATCHED = 2  # exchanges by which workers that meet may differ
_BUCKET_INSTANTS = ("t", "start", "begun", "sent", "ended")  # 0: not known
_Timed = TypeVar("_Timed", bound=StepEnded | BucketReduced | PassesTimed)


@dataclass(frozen=True)
class ObservedRound:
    """One step, as each worker reported it; by rank."""

    step: int
    workers: Mapping[int, StepEnded]

    @cached_property
    def deferred(self) -> bool:
        """Whether workers went on before they had a round's result, and waited for it in the next step."""
        return any(step.deferred_s > _ROUNDING_S for step in self.workers.values())

    @cached_property
    def meetings(self) -> tuple[Meeting, ...]:
        """Where these workers met in the step: at exchanges, then at the round; not where nobody waited."""
        placed = {rank: exchanges(step) for rank, step in self.workers.items()}
        counts = [len(own) for own in placed.values()]
        common = min(counts) if max(counts) - min(counts) <= _MOST_UNMATCHED else 0
        met: list[Meeting] = [{rank: own[at] for rank, own in placed.items()} for at in range(common)]
        at_round = {rank: (step.arrival, result_of(step)) for rank, step in self.workers.items()}
        if self.deferred:
            return (*filter(_waited, met), at_round)
        return tuple(filter(_waited, [*met, at_round]))

    @property
    def begin(self) -> float:
        """When the first worker began the step."""
        return min(step.start for step in self.workers.values())

    @property
    def end(self) -> float:
        """When the last worker ended it."""
        return max(end_of(step) for step in self.workers.values())

    @property
    def samples(self) -> int:
        """What all workers computed."""
        return sum(step.share for step in self.workers.values())

    @property
    def loss(self) -> float | None:
        """The mean loss over the samples of the workers that reported a finite one."""
        known = [(s.share, s.loss) for s in self.workers.values() if s.loss is not None]
        finite = [(share, loss) for share, loss in known if math.isfinite(loss)]
        weight = sum(share for share, _ in finite)
        return sum(share * loss for share, loss in finite) / weight if weight else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Who was late in one step and what it cost; see the module's formula. Seconds are by rank."""

    last: int
    spread_s: float
    charged_s: Mapping[int, float]
    alone_s: Mapping[int, float]
    waited_s: Mapping[int, float]
    late_result_s: Mapping[int, float]


def _waited(meeting: Meeting) -> bool:
    return max(left - came for came, left in meeting.values()) > _ROUNDING_S


def charge(arrivals: Mapping[int, float]) -> dict[int, float]:
    """The part of the spread that each worker is charged; see the module's formula."""
    ordered = sorted(arrivals, key=lambda rank: (arrivals[rank], rank))
    charged = 0.0
    charges = {}
    for place, rank in enumerate(ordered):
        if place:
            gap_s = arrivals[rank] - arrivals[ordered[place - 1]]
            charged += gap_s / (len(ordered) - place)
        charges[rank] = charged
    return charges


def judge(round_: ObservedRound, by: Basis = "arrival", before: ObservedRound | None = None) -> Judgement:
    """Who was last in this step, what each worker is charged, and how long each waited for late ones.

    `before` is the last step before it in which these workers met, if it is known.
    """
    met = round_.meetings
    sums = _Sums(round_.workers)
    previous = _last_meeting(before) if by == "arrival" else None
    if round_.deferred:
        met = met[:-1]
        late = late_at_round(round_, by)
        sums.add({rank: -late_s for rank, late_s in late.items()}, late, None)
    for meeting in met:
        arrivals = _arrivals(meeting, by)
        last = max(arrivals.values())
        sums.add(arrivals, {rank: last - came for rank, came in arrivals.items()}, previous)
        previous = meeting if by == "arrival" else None
    return sums.judgement()


def _arrivals(meeting: Meeting, by: Basis) -> dict[int, float]:
    """When each worker arrived, but no earlier than its own wait explains."""
    waits = {rank: max(0.0, left - came) for rank, (came, left) in meeting.items()}
    if by == "wait":
        return {rank: -wait_s for rank, wait_s in waits.items()}
    last = max(came for came, _ in meeting.values())
    return {rank: max(came, last - waits[rank]) for rank, (came, _) in meeting.items()}


def late_at_round(round_: ObservedRound, by: Basis = "arrival") -> dict[int, float]:
    """How long each worker waited for late ones at the round that the step waited for.

    If rounds are deferred, that is the one before. Workers then come to its result at times of their own,
    and help each other only while they wait, so arrivals say little: the worker that waits least is late.
    """
    if round_.deferred:
        waits = {rank: step.deferred_s for rank, step in round_.workers.items()}
        return {rank: wait_s - min(waits.values()) for rank, wait_s in waits.items()}
    arrivals = _arrivals({r: (s.arrival, result_of(s)) for r, s in round_.workers.items()}, by)
    last = max(arrivals.values())
    return {rank: last - came for rank, came in arrivals.items()}


def _last_meeting(round_: ObservedRound | None) -> Meeting | None:
    """The last one whose results were waited for."""
    if round_ is None or round_.deferred or not round_.meetings:
        return None
    return round_.meetings[-1]


class _Sums:
    """Adds up the meetings of one step."""

    def __init__(self, ranks: Mapping[int, object]) -> None:
        self._spread_s = 0.0
        self._charged, self._alone, self._waited, self._late_result = (
            dict.fromkeys(ranks, 0.0) for _ in range(4)
        )

    def add(
        self, arrivals: Mapping[int, float], late_s: Mapping[int, float], previous: Meeting | None
    ) -> None:
        ordered = sorted(arrivals, key=lambda rank: (arrivals[rank], rank))
        first, last = arrivals[ordered[0]], arrivals[ordered[-1]]
        self._spread_s += last - first
        if len(ordered) > 1:
            self._alone[ordered[-1]] += last - arrivals[ordered[-2]]
        results = {rank: left for rank, (_, left) in previous.items()} if previous else {}
        for rank, charged_s in charge(arrivals).items():
            self._charged[rank] += charged_s
            self._waited[rank] += late_s[rank]
            behind_s = arrivals[rank] - first
            if results and behind_s > 0:
                late_result_s = results[rank] - min(results.values())
                self._late_result[rank] += charged_s * min(1.0, late_result_s / behind_s)

    def judgement(self) -> Judgement:
        return Judgement(
            last=max(self._charged, key=lambda rank: (self._charged[rank], rank)),
            spread_s=self._spread_s,
            charged_s=self._charged,
            alone_s=self._alone,
            waited_s=self._waited,
            late_result_s=self._late_result,
        )


def contradicts(round_: ObservedRound, before: ObservedRound | None = None) -> bool:
    """Whether a worker seems to have arrived after another already had the result.

    Of a deferred round, only this is known: nobody arrives at it before all have been at the one before.
    """
    if not round_.deferred:
        return any(map(_impossible, round_.meetings))
    if before is None:
        return False
    first_arrival = min(step.arrival for step in round_.workers.values())
    return max(step.arrival for step in before.workers.values()) > first_arrival + _CLOCK_TOLERANCE_S


def _impossible(meeting: Meeting) -> bool:
    first_result = min(left for _, left in meeting.values())
    return max(came for came, _ in meeting.values()) > first_result + _CLOCK_TOLERANCE_S


def clock_offsets(rounds: Sequence[ObservedRound]) -> dict[int, float]:
    """How far each worker's clock is ahead of the lowest rank's, if results reach all workers at once.

    This is the median over rounds, so a few late results do not matter.
    """
    ahead_s: dict[int, list[float]] = {}
    for round_ in rounds:
        reference = result_of(round_.workers[min(round_.workers)])
        for rank, step in round_.workers.items():
            ahead_s.setdefault(rank, []).append(result_of(step) - reference)
    return {rank: median(ahead_s[rank]) for rank in sorted(ahead_s)}


def same_clock(event: _Timed, offsets: Mapping[int, float]) -> _Timed:
    """The event with its times on the common clock, so that workers can be drawn side by side."""
    ahead_s = offsets.get(event.rank, 0.0)
    if not ahead_s:
        return event
    instants = ("t", "start", "arrival") if isinstance(event, StepEnded) else _BUCKET_INSTANTS
    known = {name: at for name in instants if (at := getattr(event, name, 0.0))}
    return msgspec.structs.replace(event, **{name: at - ahead_s for name, at in known.items()})


def basis(contradictions: int, rounds: int, hosts: int) -> Basis:
    """What to judge by: arrival, unless most rounds contradict and there is more than one clock.

    `hosts` is the number of machines; 0 if unknown.
    """
    return "wait" if hosts != 1 and 2 * contradictions > rounds else "arrival"


class RoundTally:
    """Collects the workers' steps into rounds, in any order.

    With `limit`, at most so many incomplete rounds are kept, the newest ones. This bounds the memory if a
    worker's events never come.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._open: dict[int, dict[int, StepEnded]] = {}

    def add(self, event: StepEnded, world_size: int | None) -> ObservedRound | None:
        """The round that this step completes, if any; with an unknown `world_size` none is complete."""
        workers = self._open.setdefault(event.step, {})
        workers[event.rank] = event
        if world_size is not None and len(workers) >= world_size:
            return ObservedRound(event.step, self._open.pop(event.step))
        if self._limit is not None and len(self._open) > self._limit:
            del self._open[next(iter(self._open))]
        return None

    def incomplete(self) -> list[ObservedRound]:
        """The rounds that are not complete, by step."""
        return [ObservedRound(step, self._open[step]) for step in sorted(self._open)]


def rounds_of(steps: Iterable[StepEnded]) -> list[ObservedRound]:
    """These steps as rounds, by step; some workers may be missing."""
    rounds = RoundTally()
    for step in steps:
        rounds.add(step, None)
    return rounds.incomplete()
