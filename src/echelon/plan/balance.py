"""Which shares let all workers arrive together? Decided from what their steps took. Pure.

A worker r needs t_r = p_r (s_r + c) seconds for a share of s_r samples, where c is what a step costs apart
from its samples, counted in samples and the same for all workers (see observe/step_cost.py). Workers report
the logarithms of their times. For each worker the mean and the variance over the steps since the last
change are kept, so that it is known how far a mean can be trusted.

A step ends some time after the last worker has arrived: its gradients still have to travel. That time is
the tail of the worker that arrived last, which is the one that waited least. Tails differ: a worker with a
thin link or a busy processor needs longer. So t_r plus the tail of r is what is balanced. A worker has the
mean tail of all, unless its own is known to be another, by more than three standard errors.

    a change      the shares that balance the means, as whole samples, cut the slowest worker's time by more
                  than 5 %, and by more than three standard errors
    other speed   the last steps of a worker differ from those before by more than four standard errors and
                  by more than 15 %: what was measured before is forgotten
    c             follows from the times that different shares took, and so does how a worker's own time
                  depends on its share (plan.share_times.py)

The threshold grows after each change that no other speed explains, from the second on (the first is made
before c is known), so that shares do not swing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from echelon.observe.step_cost import StepCost
from echelon.plan.optimal_shares import best_shares
from echelon.plan.share_times import ShareTime, elasticity, fixed_samples
from echelon.plan.shares import split

_WORTHWHILE = 0.05
_ERRORS = 3.0
_OTHER_SPEED = 0.15
_OTHER_ERRORS = 4.0
_LEAST_VARIANCE = 0.02**2  # no clock of a busy machine is better
_RECENT = 2  # reports
_FEWEST_STEPS = 3
_MORE_CAUTION = 1.5
_FREE_CHANGES = 2  # of shares, without more caution
_KEPT = 4  # times of different shares that are kept for each worker
_TAILS = 20  # steps over which a mean tail is taken
_FEWEST_TAILS = 4
_TAIL_ERRORS = 3.0
_ALIKE = 4  # steps that follow each other and are late or early together: quotas, other programs


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


@dataclass(slots=True)
class _MeanTail:
    """Mean and variance of the last tails, and how many of them count."""

    mean_s: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, tail_s: float) -> None:
        self.count = min(self.count + 1, _TAILS)
        before = tail_s - self.mean_s
        self.mean_s += before / self.count
        self.variance += (before * (tail_s - self.mean_s) - self.variance) / self.count

    @property
    def error_s(self) -> float:
        return math.sqrt(self.variance / max(1, self.count - 1))


class Balancer:
    """Reports of all workers in, changes of shares out. All workers that see the same reports agree."""

    def __init__(self, batch: int, weights: Sequence[float]) -> None:
        self.batch = batch
        self.shares = split(batch, weights)
        self._known = [_NOTHING] * len(self.shares)
        self._recent: deque[list[StepReport]] = deque(maxlen=_RECENT)
        self._fixed = 0.0  # c
        self._fixed_from = 0  # how many steps it was found from
        self._earlier: list[deque[ShareTime]] = [deque(maxlen=_KEPT) for _ in self.shares]
        self._changes = 0  # since a worker's speed changed
        self._most: Sequence[int] = ()
        self._tails = [_MeanTail() for _ in self.shares]
        self._usual_tail = _MeanTail()

    def forget_tails(self) -> None:
        """Gradients travel in another way from now on."""
        self._tails = [_MeanTail() for _ in self.shares]
        self._usual_tail = _MeanTail()

    def take(self, reports: Sequence[StepReport], most: Sequence[int] = ()) -> ShareChange | None:
        """Take the reports of one interval, by rank; returns new shares if they are worth it.

        `most` are the most samples that workers' memory holds, 0 if unknown.
        """
        self._most = most
        if any(report.steps == 0 for report in reports):
            return None
        self._note_tail(reports)
        self._recent.append(list(reports))
        changed = self._differing()
        if changed:
            self._known = [_NOTHING] * len(self.shares)
            for earlier in self._recent:
                self._add(earlier)
            for rank in changed:
                self._earlier[rank].clear()
            self._changes = _FREE_CHANGES - 1
        else:
            self._add(reports)
        return self._change()

    def _note_tail(self, reports: Sequence[StepReport]) -> None:
        """The worker that waited least was last."""
        waits = [report.waited_s / report.steps for report in reports]
        last = waits.index(min(waits))
        self._tails[last].add(waits[last])
        self._usual_tail.add(waits[last])

    def _tail_s(self, rank: int) -> float:
        own, usual = self._tails[rank], self._usual_tail
        known = own.count >= _FEWEST_TAILS and abs(own.mean_s - usual.mean_s) > _TAIL_ERRORS * own.error_s
        return own.mean_s if known else usual.mean_s

    def _add(self, reports: Sequence[StepReport]) -> None:
        self._known = [one + other for one, other in zip(self._known, reports, strict=True)]

    def _differing(self) -> list[int]:
        """The workers that have another speed than before, in each of the last reports."""
        found: list[int] = []
        if len(self._recent) < _RECENT:
            return found
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
                found.append(rank)
        return found

    def _change(self) -> ShareChange | None:
        if min(known.steps for known in self._known) < _FEWEST_STEPS:
            return None
        now = self._now()
        self._learn_fixed(now)
        costs = [
            self._cost(rank, one, elasticity(self._earlier[rank], one, self._fixed))
            for rank, one in enumerate(now)
        ]
        ends = [cost.usual_s for cost in costs]
        slowest_s = max(ends)
        rank = ends.index(slowest_s)
        least = self._caution * max(_WORTHWHILE, _ERRORS * self._error(rank))
        if math.log(slowest_s / _level_s(costs, self.batch)) <= least:
            return None
        shares = best_shares(costs, self.batch, most=self._limits())
        expected_s = max(cost.at(share) for cost, share in zip(costs, shares, strict=True))
        if shares == self.shares or math.log(slowest_s / expected_s) <= least:
            return None
        speeds = [one.share / math.exp(one.log_s) for one in now]
        change = ShareChange(
            shares=shares,
            before=self.shares,
            slowest_s=slowest_s,
            expected_s=expected_s,
            rank=rank,
            speeds=tuple(speed / max(speeds) for speed in speeds),
        )
        for earlier, one in zip(self._earlier, now, strict=True):
            earlier.append(one)
        self.shares = shares
        self._known = [_NOTHING] * len(shares)
        self._recent.clear()
        self._changes += 1
        self._fixed_from = 0
        return change

    def _limits(self) -> list[int] | None:
        """The most samples of each worker: at least what it has now."""
        if not any(self._most):
            return None
        return [
            max(most, share) if most else self.batch
            for most, share in zip(self._most, self.shares, strict=True)
        ]

    @property
    def _caution(self) -> float:
        return _MORE_CAUTION ** max(0, self._changes - _FREE_CHANGES + 1)

    def _error(self, rank: int) -> float:
        """How far the slowest worker's lateness can be trusted.

        Few steps tell little about one worker's variance, so all workers' count; the slowest is one of
        several, so it is late by chance too; and steps that follow each other are not independent.
        """
        count = len(self._known)
        steps = min(known.steps for known in self._known)
        usual = sum(known.variance for known in self._known) / count
        return math.sqrt(max(self._known[rank].variance, usual) * _ALIKE / steps * (1 + 2 / count))

    def _now(self) -> list[ShareTime]:
        """Every worker's time for its present share."""
        return [
            ShareTime(share=share, log_s=known.mean, error=known.error)
            for share, known in zip(self.shares, self._known, strict=True)
        ]

    def _cost(self, rank: int, now: ShareTime, slope: float) -> StepCost:
        """What a worker's shares near the present one cost, with its tail."""
        seconds = math.exp(now.log_s)
        return StepCost(
            rank=rank,
            share=now.share,
            per_sample_s=slope * seconds / now.share,
            fixed_s=(1 - slope) * seconds + self._tail_s(rank),
        )

    def _learn_fixed(self, now: Sequence[ShareTime]) -> None:
        """Find c anew when twice as much is known since the last change of shares."""
        steps = min(known.steps for known in self._known)
        if steps < 2 * self._fixed_from or not any(self._earlier):
            return
        self._fixed_from = steps
        times = [[*earlier, one] for earlier, one in zip(self._earlier, now, strict=True)]
        self._fixed = fixed_samples(times, self.batch / len(self.shares))


def _level_s(costs: Sequence[StepCost], batch: int) -> float:
    """What a step would take if samples could be divided, and a worker could have less than none."""
    level_s = (batch + sum(cost.fixed_s / cost.per_sample_s for cost in costs)) / sum(
        1 / cost.per_sample_s for cost in costs
    )
    return max(level_s, 1e-7)


def _without(known: StepReport, part: StepReport) -> StepReport:
    return StepReport(
        steps=known.steps - part.steps,
        total=known.total - part.total,
        squares=known.squares - part.squares,
        waited_s=known.waited_s - part.waited_s,
    )
