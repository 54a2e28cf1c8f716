"""Who kept the others waiting, judged by arrival at each round.

Time spent in backward or in the reduction does not show it, because the reduction makes all workers as slow
as the slowest. The order of arrival does. Between two consecutive arrivals, the workers that have arrived
wait for the missing ones; that time is charged in equal parts to the missing workers. With arrivals
a_1 <= ... <= a_n, the worker that arrived i-th is charged

    sum over k < i of (a_(k+1) - a_k) / (n - k)

So the first worker is charged nothing, a later one never less than an earlier one, and all charges of a
round sum to its spread a_n - a_1. (This is the Shapley value of the game whose cost is the latest arrival.)
What the last worker alone could have saved, a_n - a_(n-1), is recorded too.

Arrivals are times on different machines' clocks. No worker can have a round's result before all have
arrived. If that seems to have happened in most rounds, the clocks disagree. Then rounds are judged by
waiting times, as if each result had reached all workers at the same moment, and `same_clock` corrects the
times that are drawn. (Single such rounds mean little: a worker may be interrupted between sending its last
gradient and noting the time.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias, TypeVar

import msgspec

from echelon.observe.events import BucketReduced, StepEnded

Basis: TypeAlias = Literal["arrival", "wait"]

_CLOCK_TOLERANCE_S = 1e-3
_BUCKET_INSTANTS = ("t", "start", "begun", "sent", "ended")  # 0: not known
_Timed = TypeVar("_Timed", bound=StepEnded | BucketReduced)


@dataclass(frozen=True, slots=True)
class ObservedRound:
    """One step, as each worker reported it; by rank."""

    step: int
    workers: Mapping[int, StepEnded]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Who was late in one round and what it cost; see the module's formula. Seconds are by rank."""

    last: int
    spread_s: float
    alone_s: float
    charged_s: Mapping[int, float]
    waited_s: Mapping[int, float]


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


def judge(round_: ObservedRound, by: Basis = "arrival") -> Judgement:
    """Who was last in this round, what each worker is charged, and how long each waited for late ones."""
    if by == "arrival":
        arrivals = {rank: step.arrival for rank, step in round_.workers.items()}
    else:
        arrivals = {rank: -step.wait_s for rank, step in round_.workers.items()}
    ordered = sorted(arrivals, key=lambda rank: (arrivals[rank], rank))
    last = ordered[-1]
    alone_s = arrivals[last] - arrivals[ordered[-2]] if len(ordered) > 1 else 0.0
    return Judgement(
        last=last,
        spread_s=arrivals[last] - arrivals[ordered[0]],
        alone_s=alone_s,
        charged_s=charge(arrivals),
        waited_s={
            rank: min(max(0.0, step.wait_s), arrivals[last] - arrivals[rank])
            for rank, step in round_.workers.items()
        },
    )


def contradicts(round_: ObservedRound) -> bool:
    """Whether a worker seems to have arrived after another already had the result."""
    first_result = min(step.arrival + step.wait_s for step in round_.workers.values())
    last_arrival = max(step.arrival for step in round_.workers.values())
    return last_arrival > first_result + _CLOCK_TOLERANCE_S


def clock_offsets(rounds: Sequence[ObservedRound]) -> dict[int, float]:
    """How far each worker's clock is ahead of the lowest rank's, if results reach all workers at once.

    This is the median over rounds, so a few late results do not matter.
    """
    ahead_s: dict[int, list[float]] = {}
    for round_ in rounds:
        reference = round_.workers[min(round_.workers)]
        for rank, step in round_.workers.items():
            result = step.arrival + step.wait_s
            ahead_s.setdefault(rank, []).append(result - reference.arrival - reference.wait_s)
    return {rank: median(ahead_s[rank]) for rank in sorted(ahead_s)}


def same_clock(event: _Timed, offsets: Mapping[int, float]) -> _Timed:
    """The event with its times on the common clock, so that workers can be drawn side by side."""
    ahead_s = offsets.get(event.rank, 0.0)
    if not ahead_s:
        return event
    instants = ("t", "start", "arrival") if isinstance(event, StepEnded) else _BUCKET_INSTANTS
    known = {name: at for name in instants if (at := getattr(event, name))}
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
