"""What a step costs each worker: a fixed part, and a part for every sample of its share.

A worker r needs f_r + p_r * s seconds of data and compute for a share of s samples. Workers run the same
model, so a slower worker needs more for both parts alike, and f_r / p_r is the same number of samples for
all. That number is found from steps whose shares differ, such as the last of an epoch: each worker's
medians by share are fitted by a line a_r + b_r * s, and with t_r, its time at its usual share,

    f / p  =  sum of a_r / t_r  divided by  sum of b_r / t_r

Because of the fixed part, shares in proportion to speed leave slow workers late: `balanced_shares` gives
the shares at which all workers take equally long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

from echelon.observe.events import StepEnded

_STEPS_KEPT = 500  # of each worker and share, the last ones: bounds the memory of a long run
_SHARES_KEPT = 16  # of each worker
_FEWEST_STEPS = 3  # of a share, for its median to count


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's median cost of a step in seconds: `fixed_s + share * per_sample_s`.

    `share` is its usual share. `fixed_known` is False where no worker's share varied; then the whole cost
    counts as proportional to the share.
    """

    rank: int
    share: float
    fixed_s: float
    per_sample_s: float
    fixed_known: bool = True

    @property
    def usual_s(self) -> float:
        """What a step of the usual share costs."""
        return self.at(self.share)

    def at(self, share: float) -> float:
        """What a step of this share costs."""
        return self.fixed_s + share * self.per_sample_s


class CostTally:
    """Takes the workers' steps one by one; `costs` fits them."""

    def __init__(self) -> None:
        self._busy_s: dict[int, dict[int, deque[float]]] = {}

    def add(self, event: StepEnded) -> None:
        """Take one step into account."""
        by_share = self._busy_s.setdefault(event.rank, {})
        if event.share not in by_share and len(by_share) >= _SHARES_KEPT:
            return
        kept = by_share.setdefault(event.share, deque(maxlen=_STEPS_KEPT))
        kept.append(event.data_s + event.compute_s)

    def costs(self) -> tuple[StepCost, ...]:
        """Each worker's cost, by rank; empty if one of them has no samples or took no time."""
        usual: dict[int, tuple[int, float]] = {}
        lines: list[tuple[float, float]] = []
        for rank, by_share in sorted(self._busy_s.items()):
            share = max(by_share, key=lambda share: (len(by_share[share]), share))
            usual_s = median(by_share[share])
            if share <= 0 or usual_s <= 0:
                return ()
            usual[rank] = share, usual_s
            points = [
                (s, median(kept) / usual_s) for s, kept in by_share.items() if len(kept) >= _FEWEST_STEPS
            ]
            if len(points) > 1:
                lines.append(_line(points, [len(by_share[s]) for s, _ in points]))
        fixed_samples = _fixed_samples(lines)
        return tuple(_cost(rank, share, usual_s, fixed_samples) for rank, (share, usual_s) in usual.items())


def _cost(rank: int, share: int, usual_s: float, fixed_samples: float | None) -> StepCost:
    per_sample_s = usual_s / (share + (fixed_samples or 0.0))
    return StepCost(
        rank=rank,
        share=share,
        fixed_s=(fixed_samples or 0.0) * per_sample_s,
        per_sample_s=per_sample_s,
        fixed_known=fixed_samples is not None,
    )


def _line(points: Sequence[tuple[float, float]], weights: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    common = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    slope = common / spread
    return mean_y - slope * mean_x, slope


def _fixed_samples(lines: Sequence[tuple[float, float]]) -> float | None:
    """The fixed cost as a number of samples; None if unknown."""
    slope = sum(slope for _, slope in lines)
    if slope <= 0:
        return None
    return max(0.0, sum(intercept for intercept, _ in lines) / slope)


def balanced_shares(costs: Sequence[StepCost], batch: float) -> dict[int, float]:
    """The shares of a batch, at least one sample each, at which all workers take equally long; by rank."""
    shares: dict[int, float] = {}
    free = list(costs)
    while free:
        left = batch - len(shares)
        level_s = (left + sum(c.fixed_s / c.per_sample_s for c in free)) / sum(
            1 / c.per_sample_s for c in free
        )
        slow = [c for c in free if level_s < c.at(1.0)]
        if not slow or left < len(free):
            shares |= {c.rank: max(1.0, (level_s - c.fixed_s) / c.per_sample_s) for c in free}
            break
        shares |= {c.rank: 1.0 for c in slow}
        free = [c for c in free if c not in slow]
    return dict(sorted(shares.items()))
