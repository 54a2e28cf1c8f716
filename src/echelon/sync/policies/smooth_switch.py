"""Smooth switch: from asynchronous to synchronous, by a buffer of gradients that grows.

The server keeps gradients and makes one update of them when it holds K. K follows a threshold of the number
of gradients that have arrived so far (`threshold.py`); it is 1 at first, which is async, and grows to the
number of workers. It never decreases, but never exceeds the workers that take part now either. An update
takes all that the buffer holds: their mean by samples, or their sum.

Not waiting, a worker goes on at once with the weights as they are, and may have several gradients in the
buffer. Waiting, it goes on when its gradient has been applied: start=N with waiting is full
synchronisation. What the buffer holds when the last worker leaves is applied then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

from echelon.errors import ConfigError
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Release,
    Rule,
    ServePolicy,
    WeightedPush,
    mean,
    needs_server,
)
from echelon.sync.policy import ClusterInfo
from echelon.sync.threshold import THRESHOLDS, Growth, Threshold
from echelon.sync.thresholds.step import StepThreshold

_USUAL_STEP = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothSwitch(ServePolicy):
    """One update per K gradients; K grows from 1 (async) to all workers (synchronous).

    `step` is after how many gradients K grows by one, 500 unless told; `step_over_lr` the same as a
    multiple of 1 / learning rate; `threshold` another threshold, such as "noise" or "linear(0.01)".
    K is never below `start`.
    """

    name: ClassVar[str] = "smooth-switch"
    step: float | None = None
    step_over_lr: float | None = None
    threshold: str = ""
    combine: Literal["mean", "sum"] = "mean"
    waiting: bool = False
    start: int = 1

    def __post_init__(self) -> None:
        given = {
            "step": self.step is not None,
            "step_over_lr": self.step_over_lr is not None,
            "threshold": self.threshold != "",
        }
        if sum(given.values()) > 1:
            names = " and ".join(name for name in given if given[name])
            raise ConfigError(f"{names} are given", where="sync smooth-switch", fix="give one of them")
        for option, value in (("step", self.step), ("step_over_lr", self.step_over_lr)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"{option} is {value:g}, it has to be a number above 0",
                    where=f"sync smooth-switch, {option}",
                    fix="give after how many gradients K grows by one",
                )
        if self.start < 1:
            raise ConfigError(
                f"an update cannot be made of {self.start} gradients",
                where="sync smooth-switch, start",
                fix="give 1 to begin like async, or more",
            )
        if self.threshold:
            _built(self.threshold)

    @property
    def listens(self) -> bool:  # type: ignore[override]  # depends on the threshold; costs time per push
        """Whether the threshold measures gradients."""
        return self.threshold != "" and _built(self.threshold).listens

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server, at least `start` workers, and a threshold that never decreases."""
        needs_server(self, cluster)
        if self.start > cluster.workers:
            raise ConfigError(
                f"an update of {self.start} gradients is more than {cluster.workers} workers send",
                where="sync smooth-switch, start",
                fix=f"give at most {cluster.workers}, the number of workers",
            )
        self.growing(cluster).check(cluster.workers)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """An empty buffer."""
        return _Buffer(self, cluster.workers, self.growing(cluster).growth(cluster.workers))

    def growing(self, cluster: ClusterInfo) -> Threshold:
        """The threshold that the options ask for."""
        if self.threshold:
            return _built(self.threshold)
        if self.step_over_lr is None:
            return StepThreshold(size=self.step if self.step is not None else _USUAL_STEP)
        if cluster.lr is None or not cluster.lr > 0:
            known = "is not known here" if cluster.lr is None else f"is {cluster.lr:g}"
            raise ConfigError(
                f"the step is a multiple of 1 / learning rate, which {known}",
                where="sync smooth-switch, step_over_lr",
                fix="give the step itself, in gradients: step=500",
            )
        return StepThreshold(size=self.step_over_lr / cluster.lr)


@lru_cache(maxsize=64)
def _built(text: str) -> Threshold:
    """Kept, for a server asks at every push whether it listens."""
    return THRESHOLDS.build(text, where="threshold")


class _Buffer(Rule):
    def __init__(self, options: SmoothSwitch, workers: int, growth: Growth) -> None:
        self._options = options
        self._workers = workers
        self._growth = growth
        self._active = set(range(workers))
        self._grown = options.start
        self._buffer: list[Arrival] = []

    @property
    def _k(self) -> int:
        """1 when nobody is left, so that the last one's leaving empties the buffer."""
        return max(1, min(self._grown, len(self._active)))

    def arrive(self, arrival: Arrival) -> list[Decision]:
        wanted = min(self._growth.after(arrival), self._workers)
        self._grown = max(self._grown, math.floor(wanted))
        self._buffer.append(arrival)
        decisions = self._apply_if_full()
        if not self._options.waiting:
            decisions.append(Release(arrival.worker))
        return decisions

    def leave(self, worker: int, t: float) -> list[Decision]:
        self._active.discard(worker)
        return self._apply_if_full()

    def join(self, worker: int, t: float) -> list[Decision]:
        self._active.add(worker)
        return []

    def state(self) -> dict[str, float]:
        return {"K": self._k, "buffered": len(self._buffer)}

    def _apply_if_full(self) -> list[Decision]:
        if len(self._buffer) < self._k:
            return []
        taken, self._buffer = self._buffer, []
        by_sum = Apply(tuple(WeightedPush(a.worker, a.step, 1.0) for a in taken))
        decisions: list[Decision] = [by_sum if self._options.combine == "sum" else mean(taken)]
        if self._options.waiting:
            decisions += [Release(arrival.worker) for arrival in taken]
        return decisions
