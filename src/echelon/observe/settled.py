"""Who keeps the others waiting with the shares that a run has found?

Shares may change while a run goes on. Rounds from before say nothing about the workers' lateness with
today's shares, so these are the figures of the rounds since the last change. If too few followed it, there
are none.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping

import msgspec

from echelon.observe.arrival import Basis, ObservedRound
from echelon.observe.decisions import SETTLING_STEPS
from echelon.observe.lateness import LatenessTally, Standstill
from echelon.observe.step_cost import CostTally, StepCost
from echelon.observe.worker_figures import WorkerSummary, WorkerSums, worker_summary

_ENOUGH_ROUNDS = 20  # after the last change of shares, or half of the run: then only these are judged


class SettledFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the rounds from `step` on, since the last change of shares; names as in `Summary`."""

    step: int
    seconds: float
    rounds: int
    judged_by: Basis
    spread_s: float
    met: int
    meet_often: bool
    standstills: tuple[Standstill, ...]
    workers: tuple[WorkerSummary, ...]
    costs: tuple[StepCost, ...]


class SettledTally:
    """Takes complete rounds one by one; sums those since the last change of shares.

    A worker's events come in order, so a round from after a change is complete only when the change is
    known.
    """

    def __init__(self, changed_at: int) -> None:
        self.first = changed_at + SETTLING_STEPS
        self._changed_at = changed_at
        self._lateness = LatenessTally()
        self._workers: dict[int, WorkerSums] = {}
        self._costs = CostTally()
        self._begin, self._end = math.inf, -math.inf

    def after(self, changed_at: int) -> SettledTally:
        """These sums, or new ones if shares were changed later."""
        return self if changed_at <= self._changed_at else SettledTally(changed_at)

    def add(self, round_: ObservedRound) -> None:
        """Take a complete round into account, if it is from after the change."""
        if round_.step < self.first:
            return
        self._lateness.add(round_)
        self._begin, self._end = min(self._begin, round_.begin), max(self._end, round_.end)
        for rank, step in round_.workers.items():
            self._workers.setdefault(rank, WorkerSums()).add(step)
            self._costs.add(step)

    def with_more(self, rounds: Iterable[ObservedRound]) -> SettledTally:
        """The same with some more rounds; this one stays as it is."""
        other = copy.deepcopy(self)
        for round_ in rounds:
            other.add(round_)
        return other

    def figures(self, known: Mapping[int, WorkerSums], hosts: int, of: int) -> SettledFigures | None:
        """The figures, if enough of `of` rounds followed the change; nodes and devices are `known`."""
        lateness = self._lateness.figures(hosts)
        if not lateness.rounds or lateness.rounds < min(_ENOUGH_ROUNDS, of / 2):
            return None
        for rank, worker in self._workers.items():
            worker.node, worker.device = known[rank].node, known[rank].device
        return SettledFigures(
            step=self.first,
            seconds=max(0.0, self._end - self._begin),
            rounds=lateness.rounds,
            judged_by=lateness.judged_by,
            spread_s=lateness.spread_s,
            met=lateness.met,
            meet_often=lateness.meet_often,
            standstills=lateness.standstills,
            workers=tuple(
                worker_summary(rank, self._workers[rank], lateness) for rank in sorted(self._workers)
            ),
            costs=self._costs.costs(),
        )
