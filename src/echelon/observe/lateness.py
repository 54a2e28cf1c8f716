"""Who was late over a whole run, and how: in every round, now and then, or once.

Each step that workers took together is judged by arrival.py; here the judgements are summed. Workers that
meet are a circle: all workers, or with `levels` each group, and the groups' first ranks. A late member
makes its whole group late, so first ranks are judged only if that does not explain their lateness.

A standstill is a round whose spread stands far out from all others: at most `_MOST_STANDSTILLS` rounds do,
and at most a tenth, each at least `_FAR_OUT` times as long as the longest of the rest. A worker is late
steadily if it was charged at least half of its mean charge in most of its rounds, standstills aside. A
worker that is late in few rounds, but then for long, is not.

Memory does not grow with the run: of a worker's charges, a histogram with bins a fifth apart is kept.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from echelon.observe.arrival import (
    Basis,
    Judgement,
    ObservedRound,
    RoundTally,
    basis,
    contradicts,
    judge,
)
from echelon.observe.events import StepEnded
from echelon.observe.spans import exchanges

_MOST_STANDSTILLS = 3
_FAR_OUT = 5.0
_ENOUGH_ROUNDS = 5  # for one of them to stand out
_EXPLAINS = 0.5  # of the spread between groups: if one inside a group is so long, it is the reason
_BINS_PER_DOUBLING = 4
_SHORTEST_S = 1e-7
_BASES: tuple[Basis, ...] = ("arrival", "wait")


class Standstill(msgspec.Struct, frozen=True, kw_only=True):
    """One round in which one worker kept the others waiting far longer than in all other rounds."""

    step: int
    rank: int
    seconds: float


@dataclass(kw_only=True, slots=True)
class WorkerLateness:
    """One worker's sums over its rounds; the figures of `WorkerSummary` with the same names."""

    rounds: int = 0
    times_last: int = 0
    held_up_s: float = 0.0
    alone_s: float = 0.0
    late_s: float = 0.0
    late_result_s: float = 0.0
    steady: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Lateness:
    """The figures of a run. `met` is how many workers meet in a circle, `spread_s` is the worst circle's.

    `meet_often` tells whether workers met several times in a step, or went on before they had the result.
    """

    rounds: int = 0
    met: int = 0
    judged_by: Basis = "arrival"
    spread_s: float = 0.0
    meet_often: bool = False
    standstills: tuple[Standstill, ...] = ()
    workers: Mapping[int, WorkerLateness] = field(default_factory=dict)

    def of(self, rank: int) -> WorkerLateness:
        """One worker's sums."""
        return self.workers.get(rank, WorkerLateness())


@dataclass(slots=True)
class _Charges:
    """How often a worker was charged how much."""

    bins: dict[int, int] = field(default_factory=dict)

    def add(self, seconds: float) -> None:
        place = math.floor(_BINS_PER_DOUBLING * math.log2(max(seconds, _SHORTEST_S)))
        self.bins[place] = self.bins.get(place, 0) + 1

    def at_least(self, seconds: float) -> int:
        """How many were at least so long, or in the same bin."""
        place = math.floor(_BINS_PER_DOUBLING * math.log2(max(seconds, _SHORTEST_S)))
        return sum(count for known, count in self.bins.items() if known >= place)


@dataclass(slots=True)
class _Judged:
    """The judgements of one circle by one basis."""

    spread_s: float = 0.0
    longest: list[tuple[float, int, int]] = field(default_factory=list)  # spread, step, last; longest first
    workers: dict[int, WorkerLateness] = field(default_factory=dict)
    charges: dict[int, _Charges] = field(default_factory=dict)

    def add(self, step: int, judged: Judgement) -> None:
        self.spread_s += judged.spread_s
        self.longest = sorted([*self.longest, (judged.spread_s, step, judged.last)], reverse=True)
        del self.longest[_MOST_STANDSTILLS + 1 :]
        for rank, charged_s in judged.charged_s.items():
            worker = self.workers.setdefault(rank, WorkerLateness())
            worker.rounds += 1
            worker.times_last += rank == judged.last
            worker.held_up_s += charged_s
            worker.alone_s += judged.alone_s[rank]
            worker.late_s += judged.waited_s[rank]
            worker.late_result_s += judged.late_result_s[rank]
            self.charges.setdefault(rank, _Charges()).add(charged_s)

    def standstills(self, rounds: int) -> list[Standstill]:
        """The rounds, of so many, that stand far out from the others."""
        most = max(rounds // 10, rounds >= _ENOUGH_ROUNDS)
        for count in range(min(most, len(self.longest) - 1), 0, -1):
            if self.longest[count - 1][0] >= _FAR_OUT * max(self.longest[count][0], _SHORTEST_S):
                found = self.longest[:count]
                return [
                    Standstill(step=step, rank=rank, seconds=spread_s) for spread_s, step, rank in found
                ]
        return []

    def steady(self, rank: int, standstills: Iterable[Standstill]) -> float:
        """The share of its rounds in which a worker was half as late as on average, standstills aside."""
        worker = self.workers[rank]
        stood_still = [standstill.seconds for standstill in standstills if standstill.rank == rank]
        rounds = worker.rounds - len(stood_still)
        mean_s = (worker.held_up_s - sum(stood_still)) / max(1, rounds)
        if rounds < 1 or mean_s <= _SHORTEST_S:
            return 0.0
        return min(1.0, (self.charges[rank].at_least(mean_s / 2) - len(stood_still)) / rounds)


@dataclass(slots=True)
class _Circle:
    """Workers that meet, judged both ways: which one counts is known only at the end."""

    rounds: int = 0
    contradictions: int = 0
    before: ObservedRound | None = None
    by: dict[Basis, _Judged] = field(default_factory=lambda: {by: _Judged() for by in _BASES})

    def add(self, round_: ObservedRound) -> None:
        self.rounds += 1
        self.contradictions += contradicts(round_, self.before)
        for by, judged in self.by.items():
            judged.add(round_.step, judge(round_, by, self.before))
        self.before = round_


class LatenessTally:
    """Takes the rounds of a run one by one, those of each circle in order."""

    def __init__(self) -> None:
        self._circles: dict[tuple[int, ...], _Circle] = {}
        self._between = _Circle()
        self._firsts: tuple[int, ...] = ()
        self._often = False

    def add(self, round_: ObservedRound, *, between: bool = False) -> None:
        """Take a round into account, if its workers met; a single worker meets nobody.

        `between`: its workers are the first ranks of groups.
        """
        met = round_.meetings if len(round_.workers) > 1 else ()
        if not met:
            return
        ranks = tuple(sorted(round_.workers))
        if between:
            self._firsts = ranks
            self._between.add(round_)
        else:
            self._often = self._often or len(met) > 1 or round_.deferred
            self._circles.setdefault(ranks, _Circle()).add(round_)

    def with_more(self, rounds: Sequence[ObservedRound]) -> LatenessTally:
        """The same with some more rounds; this one stays as it is."""
        other = copy.deepcopy(self) if rounds else self
        for round_ in rounds:
            other.add(round_)
        return other

    def figures(self, hosts: int, *, all_meet: bool = True) -> Lateness:
        """The figures so far; `hosts` as for `arrival.basis`.

        If not `all_meet`, a worker may have a result before another has arrived. That says nothing about
        clocks then: with several machines, waiting times are trusted.
        """
        circles = dict(self._circles)
        by: Basis = "arrival" if hosts == 1 else "wait"
        if all_meet:
            contradictions = sum(circle.contradictions for circle in circles.values())
            by = basis(contradictions, sum(circle.rounds for circle in circles.values()), hosts)
        longest_s = max((circle.by[by].spread_s for circle in circles.values()), default=0.0)
        if longest_s < _EXPLAINS * self._between.by[by].spread_s:
            circles[self._firsts] = self._between
        if not circles:
            return Lateness()
        worst = max(circles.values(), key=lambda circle: circle.by[by].spread_s)
        standstills = worst.by[by].standstills(worst.rounds)
        return Lateness(
            rounds=max(circle.rounds for circle in circles.values()),
            met=len(worst.by[by].workers),
            judged_by=by,
            spread_s=worst.by[by].spread_s,
            meet_often=self._often,
            standstills=tuple(standstills),
            workers=_summed([circle.by[by] for circle in circles.values()], standstills, all_meet=all_meet),
        )


def _summed(
    circles: Iterable[_Judged], standstills: Sequence[Standstill], *, all_meet: bool
) -> dict[int, WorkerLateness]:
    """Each worker's sums over its circles; of how it was late, what holds where it cost most."""
    found: dict[int, WorkerLateness] = {}
    for circle in sorted(circles, key=lambda circle: circle.spread_s):
        for rank, own in circle.workers.items():
            sums = found.setdefault(rank, WorkerLateness())
            sums.rounds = max(sums.rounds, own.rounds)
            sums.times_last = max(sums.times_last, own.times_last)
            sums.held_up_s += own.held_up_s
            sums.alone_s += own.alone_s
            sums.late_s += own.late_s
            sums.late_result_s += own.late_result_s if all_meet else 0.0
            sums.steady = circle.steady(rank, standstills)
    return found


class CircleTally:
    """Collects the steps of workers in groups (`levels`) into rounds of those who meet.

    The members of a group meet in every step. Its first rank may then meet those of the other groups: these
    exchanges come after the group's, and the other members do not have them.
    """

    def __init__(self, groups: Sequence[Sequence[int]], limit: int | None = None) -> None:
        self._groups = [tuple(group) for group in groups]
        self._inside = {rank: RoundTally(limit) for group in self._groups for rank in group[:1]}
        self._between = RoundTally(limit)

    def add(self, event: StepEnded) -> tuple[ObservedRound | None, ObservedRound | None]:
        """The rounds that this step completes: inside a group, and between the groups."""
        group = next((group for group in self._groups if event.rank in group), ())
        inside = self._inside[group[0]].add(event, len(group)) if group else None
        if inside is None:
            return None, None
        return inside, self._between.add(_outside_of(inside, group[0]), len(self._groups))


def _outside_of(round_: ObservedRound, first: int) -> StepEnded:
    """The first rank's step with only the exchanges that the other members of its group do not have."""
    step = round_.workers[first]
    others = [len(other.exchanges_us) for rank, other in round_.workers.items() if rank != first]
    shared = min(others, default=0)
    begins = exchanges(step)[shared - 1][1] if 0 < shared <= len(step.exchanges_us) else step.start
    kept = step.exchanges_us[shared:]
    waited_s = sum(wait_us for _, wait_us in kept) / 1e6
    return msgspec.structs.replace(
        step, start=begins, exchanges_us=kept, wait_s=waited_s, deferred_s=0.0, arrival=step.t
    )
