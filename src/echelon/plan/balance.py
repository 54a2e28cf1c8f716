"""Which shares let all workers arrive together? Decided from what their steps took. Pure.

A worker r needs t_r = p_r (s_r + c) seconds for a share of s_r samples, where c is what a step costs apart
from its samples, counted in samples and the same for all workers (see observe/step_cost.py). Workers report
the logarithms of their times. For each worker the mean and the variance over the steps since the last
change are kept, so that it is known how far a mean can be trusted.

A step ends some time after the last worker has arrived: its gradients still have to travel. That time is
the tail of the worker that arrived last, which is the one that waited least. Tails differ: a worker with a
thin link or a busy processor needs longer. So t_r plus the tail of r is what is balanced. A worker that was
never last has the smallest tail that is known.

    a change      the shares that balance the means, as whole samples, cut the slowest worker's time by more
                  than 5 %, and by more than three standard errors
    other speed   the last steps of a worker differ from those before by more than four standard errors and
                  by more than 15 %: what was measured before is forgotten
    c             follows from the times before and after a change of shares

The threshold grows after each change that no other speed explains, so that shares do not swing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.observe.step_cost import StepCost, balanced_shares
from echelon.plan.shares import split

_WORTHWHILE = 0.05
_ERRORS = 3.0
_OTHER_SPEED = 0.15
_OTHER_ERRORS = 4.0
_LEAST_VARIANCE = 0.02**2  # no clock of a busy machine is better
_RECENT = 2  # reports
_FEWEST_STEPS = 3
_FIRST_CAUTION, _MORE_CAUTION = 0.99, 1.5
_LEAST_CHANGE = 0.2  # of a share, for the times before and after to tell c
_NEWEST_TAIL = 0.2  # its part of the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What a worker says of its last steps.

    How many, sum and sum of squares of their logarithms, and the seconds that it waited for others.
    """

    steps: int
    total: float
    squares: float
    waited_s: float = 0.0

    @classmethod
    def of(cls, seconds: Sequence[float], waited_s: float = 0.0) -> StepReport:
        """The report on steps that took so long, without what was waited in all of them."""
        logs = [math.log(max(one, 1e-7)) for one in seconds]
        squares = sum(log * log for log in logs)
        return cls(steps=len(logs), total=sum(logs), squares=squares, waited_s=waited_s)

    def __add__(self, other: StepReport) -> StepReport:
        return StepReport(
            steps=self.steps + other.steps,
            total=self.total + other.total,
            squares=self.squares + other.squares,
            waited_s=self.waited_s + other.waited_s,
        )

    @property
    def mean(self) -> float:
        """The mean of the logarithms."""
        return self.total / self.steps

    @property
    def variance(self) -> float:
        """The variance of the logarithms; one or two steps cannot tell."""
        if self.steps < 2:
            return _LEAST_VARIANCE
        spread = self.squares / self.steps - self.mean**2
        return max(_LEAST_VARIANCE, spread * self.steps / (self.steps - 1))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return math.sqrt(self.variance / self.steps)


_NOTHING = StepReport(steps=0, total=0.0, squares=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChange:
    """New shares, and what they are expected to bring.

    slowest_s, expected_s  a step before, and as it is expected
    rank                   the worker that was slowest
    speeds                 of all workers, relative to the fastest, by rank
    """

    shares: tuple[int, ...]
    before: tuple[int, ...]
    slowest_s: float
    expected_s: float
    rank: int
    speeds: tuple[float, ...]


class Balancer:
    """Reports of all workers in, changes of shares out. All workers that see the same reports agree."""

    def __init__(self, batch: int, weights: Sequence[float]) -> None:
        self.batch = batch
        self.shares = split(batch, weights)
        self._known = [_NOTHING] * len(self.shares)
        self._recent: deque[list[StepReport]] = deque(maxlen=_RECENT)
        self._fixed = 0.0  # c
        self._earlier: tuple[tuple[int, ...], list[float]] | None = None
        self._fixed_known = False
        self._caution = _FIRST_CAUTION
        self._tails: dict[int, float] = {}

    def forget_tails(self) -> None:
        """Gradients travel in another way from now on."""
        self._tails.clear()

    def take(self, reports: Sequence[StepReport]) -> ShareChange | None:
        """Take the reports of one interval, by rank; returns new shares if they are worth it."""
        if any(report.steps == 0 for report in reports):
            return None
        self._note_tail(reports)
        self._recent.append(list(reports))
        if self._differs():
            self._known = [_NOTHING] * len(self.shares)
            for earlier in self._recent:
                self._add(earlier)
            self._earlier = None
            self._caution = 1.0 if self._fixed_known else _FIRST_CAUTION
        else:
            self._add(reports)
        return self._change()

    def _note_tail(self, reports: Sequence[StepReport]) -> None:
        """The worker that waited least was last."""
        waits = [report.waited_s / report.steps for report in reports]
        last = waits.index(min(waits))
        known = self._tails.get(last, waits[last])
        self._tails[last] = known + _NEWEST_TAIL * (waits[last] - known)

    def _tail_s(self, rank: int) -> float:
        return self._tails.get(rank, min(self._tails.values(), default=0.0))

    def _add(self, reports: Sequence[StepReport]) -> None:
        self._known = [one + other for one, other in zip(self._known, reports, strict=True)]

    def _differs(self) -> bool:
        """Whether a worker has another speed than before, in each of the last reports."""
        if len(self._recent) < _RECENT:
            return False
        for rank, known in enumerate(self._known):
            # What is known includes all but the newest report.
            old = known
            for earlier in list(self._recent)[:-1]:
                old = _without(old, earlier[rank])
            if old.steps < _FEWEST_STEPS:
                continue
            shifts = [report[rank].mean - old.mean for report in self._recent]
            steps = sum(report[rank].steps for report in self._recent)
            error = math.sqrt(old.variance * (1 / old.steps + 1 / steps))
            least = min(abs(shift) for shift in shifts)
            alike = all(shift > 0 for shift in shifts) or all(shift < 0 for shift in shifts)
            if alike and least > max(_OTHER_SPEED, _OTHER_ERRORS * error):
                return True
        return False

    def _change(self) -> ShareChange | None:
        if min(known.steps for known in self._known) < _FEWEST_STEPS:
            return None
        times = [math.exp(known.mean) for known in self._known]
        self._learn_fixed(times)
        costs = [
            StepCost(
                rank=rank,
                share=share,
                per_sample_s=time_s / (share + self._fixed),
                fixed_s=self._fixed * time_s / (share + self._fixed) + self._tail_s(rank),
            )
            for rank, (share, time_s) in enumerate(zip(self.shares, times, strict=True))
        ]
        shares = whole_shares(costs, self.batch)
        ends = [cost.at(share) for cost, share in zip(costs, self.shares, strict=True)]
        slowest_s = max(ends)
        expected_s = max(cost.at(share) for cost, share in zip(costs, shares, strict=True))
        rank = ends.index(slowest_s)
        gain = math.log(slowest_s / expected_s)
        # Few steps tell little about one worker's variance, so all workers' count; the slowest was chosen
        # among several, so it is late by chance too.
        steps = min(known.steps for known in self._known)
        variance = max(self._known[rank].variance, sum(known.variance for known in self._known) / len(ends))
        error = math.sqrt(variance / steps * (1 + 2 / len(ends)))
        if shares == self.shares or gain <= self._caution * max(_WORTHWHILE, _ERRORS * error):
            return None
        least_s = min(cost.per_sample_s for cost in costs)
        change = ShareChange(
            shares=shares,
            before=self.shares,
            slowest_s=slowest_s,
            expected_s=expected_s,
            rank=rank,
            speeds=tuple(least_s / cost.per_sample_s for cost in costs),
        )
        self._earlier = (self.shares, times)
        self.shares = shares
        self._known = [_NOTHING] * len(shares)
        self._recent.clear()
        # The second change is allowed as soon as the first: only then is c known.
        self._caution = 1.0 if self._caution < 1 else self._caution * _MORE_CAUTION
        return change

    def _learn_fixed(self, times: Sequence[float]) -> None:
        """Find c from the times before and after the last change: t = p (s + c), with p unchanged."""
        if self._earlier is None:
            return
        shares, earlier = self._earlier
        intercepts = slopes = 0.0
        for s1, t1, s2, t2 in zip(shares, earlier, self.shares, times, strict=True):
            if abs(s2 - s1) < _LEAST_CHANGE * s1:
                continue
            slope = (t2 - t1) / (s2 - s1)
            usual = (t1 + t2) / 2  # every worker counts alike, whatever its speed
            slopes += slope / usual
            intercepts += (t1 - slope * s1) / usual
        self._earlier = None
        if slopes > 0:
            self._fixed = min(max(0.0, intercepts / slopes), float(self.batch))
            self._fixed_known = True


def whole_shares(costs: Sequence[StepCost], batch: int) -> tuple[int, ...]:
    """The whole shares of a batch, at least one each, at which the slowest worker needs least; by rank."""
    wanted = balanced_shares(costs, batch)
    shares = [max(1, math.floor(wanted[cost.rank])) for cost in costs]
    for _ in range(batch - sum(shares)):
        rank = min(range(len(shares)), key=lambda at: costs[at].at(shares[at] + 1))
        shares[rank] += 1
    for _ in range(sum(shares) - batch):
        rank = max(
            (at for at in range(len(shares)) if shares[at] > 1), key=lambda at: costs[at].at(shares[at])
        )
        shares[rank] -= 1
    return tuple(shares)


def _without(known: StepReport, part: StepReport) -> StepReport:
    return StepReport(
        steps=known.steps - part.steps,
        total=known.total - part.total,
        squares=known.squares - part.squares,
        waited_s=known.waited_s - part.waited_s,
    )
