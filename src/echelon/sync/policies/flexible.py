"""Flexible: a slow worker is left out of rounds until it is normal again.

Algorithms 2 and 3 of Wang and others, "Hierarchical Heterogeneous Cluster Systems for Scalable Distributed
Deep Learning", with rounds at a server. The members of a round are all workers that are not left out; when
all have arrived, the update is the mean over their samples, and they get new weights. At the start of a
round a detector sets each worker's longest normal time, for computing (C) and for transfers (T) separately.

- Late: a member that has not arrived C + T (plus the usual remaining time) after its release is left out of
  the round, if another member has arrived. If even the first arrival is late, the deadlines of the others
  start again from there.
- Slow: a member that took more than C + T counts in its round, because the others have waited for it, and
  is left out of the next. A long transfer with a short computation delays nobody and does not count as
  slow.
- Alone: a worker that is left out continues with its own weights. A gradient that arrives after its round
  is not applied at the server; the worker applies it itself. Before the end of each later step it asks.
- Back: a worker whose last step and last transfer were short enough is invited to the open round. A slow
  transfer can only be measured again by a transfer, so such a worker is invited after `retry` rounds. It
  sends how its weights have changed since it last got some; this delta, times its part of the samples, is
  added, so newer weights are never overwritten. A delta is never too late.

If all members are slow at once, none is left out; if only left-out workers remain, they are taken back. So
every round has a member.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from echelon.errors import ConfigError
from echelon.sync.detector import DETECTORS, KEPT, Detector
from echelon.sync.families.serve import (
    Arrival,
    Decision,
    Drop,
    Invite,
    Release,
    Rule,
    ServePolicy,
    Wake,
    mean,
    needs_server,
)
from echelon.sync.policy import ClusterInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Flexible(ServePolicy):
    """Leaves a slow worker out until it is normal again.

    `detector` judges compute times, `transfer` judges transfer times (the same detector unless given). A
    worker with slow transfers is tried again after `retry` rounds.
    """

    name: ClassVar[str] = "flexible"
    alone: ClassVar[bool] = True
    detector: str = "median-mad"
    transfer: str = ""
    retry: int = 10

    def __post_init__(self) -> None:
        self._detectors()
        if self.retry < 1:
            raise ConfigError(
                f"retry is {self.retry}, but must be 1 or more", where="retry", fix="give 1 round or more"
            )

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server."""
        needs_server(self, cluster)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """The rounds of one run."""
        compute, transfer = self._detectors()
        return _FlexibleRounds(_Times(cluster.workers, compute, transfer), cluster.workers, self.retry)

    def _detectors(self) -> tuple[Detector, Detector]:
        compute = DETECTORS.build(self.detector, where="detector")
        return compute, DETECTORS.build(self.transfer, where="transfer") if self.transfer else compute


class _Times:
    """The workers' past times and their limits, which change only with `update`."""

    def __init__(self, workers: int, compute: Detector, transfer: Detector) -> None:
        self._detectors = compute, transfer
        self._compute_s: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(workers)]
        self._transfer_s: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(workers)]
        self._rests_s: deque[float] = deque([0.0], maxlen=4 * workers)
        self._last_step = [-1] * workers
        self.update()

    def update(self) -> None:
        """Compute the limits from all times so far."""
        self._compute_limits = self._detectors[0].limits(self._compute_s)
        self._transfer_limits = self._detectors[1].limits(self._transfer_s)
        self._rest_s = median(self._rests_s)

    def note(self, arrival: Arrival, released: float | None) -> None:
        """Record the times of an arrival that followed a release."""
        if self._last_step[arrival.worker] != arrival.step:  # an ask for this step may have come before
            self._compute_s[arrival.worker].append(arrival.compute_s)
            self._last_step[arrival.worker] = arrival.step
        if arrival.kind == "ask":
            return
        self._transfer_s[arrival.worker].append(arrival.transfer_s)
        if released is not None:
            rest_s = arrival.t - released - arrival.compute_s - arrival.transfer_s
            self._rests_s.append(max(0.0, rest_s))

    def within_s(self, worker: int) -> float:
        """The longest normal time from a worker's release to its next arrival."""
        return self._limit_s(worker) + self._rest_s

    def normal(self, arrival: Arrival) -> bool:
        """Whether the arrival's times are normal; for an ask, with the worker's last transfer time."""
        transfer_s = arrival.transfer_s
        if arrival.kind == "ask":
            past = self._transfer_s[arrival.worker]
            transfer_s = past[-1] if past else 0.0
        return arrival.compute_s + transfer_s <= self._limit_s(arrival.worker)

    def computes_normally(self, arrival: Arrival) -> bool:
        """Whether the compute time alone is normal."""
        return arrival.compute_s <= self._compute_limits[arrival.worker]

    def _limit_s(self, worker: int) -> float:
        return self._compute_limits[worker] + self._transfer_limits[worker]


class _FlexibleRounds(Rule):
    """The rounds of one run.

    `_missing` maps the members that have not arrived to their deadlines, `_out` the left-out workers to the
    round since when. `_handed` is the round in which each worker last got weights, `_released` the time.
    """

    def __init__(self, times: _Times, workers: int, retry: int) -> None:
        self._times = times
        self._retry = retry
        self._round = 0
        self._active = set(range(workers))
        self._missing = dict.fromkeys(range(workers), math.inf)
        self._arrived: dict[int, Arrival] = {}
        self._out: dict[int, int] = {}
        self._handed = [0] * workers
        self._released: dict[int, float] = {}
        self._wake_t = math.inf

    def arrive(self, arrival: Arrival) -> list[Decision]:
        worker = arrival.worker
        stale = arrival.kind == "gradient" and self._handed[worker] < self._round
        self._times.note(arrival, None if stale else self._released.pop(worker, None))
        if arrival.kind == "ask":
            return self._ask(arrival)
        if stale:
            return self._too_late(arrival)
        self._out.pop(worker, None)
        due = self._missing.pop(worker, math.inf)
        first = not self._arrived
        self._arrived[worker] = arrival
        if first and arrival.t > due:
            for other in self._missing:
                self._expect(other, arrival.t)
        return self._settle(arrival.t, look=first)

    def _too_late(self, arrival: Arrival) -> list[Decision]:
        worker = arrival.worker
        if worker in self._missing:  # it was taken back meanwhile: the others wait for its next push
            self._expect(worker, arrival.t)
        reason = f"left out of round {self._handed[worker]}"
        return [Drop(worker, arrival.step, reason), Release(worker, fresh=False, ask=True)]

    def _ask(self, arrival: Arrival) -> list[Decision]:
        worker, t = arrival.worker, arrival.t
        if worker in self._out and not self._comes_back(arrival):
            return [Release(worker, fresh=False, ask=True)]
        self._out.pop(worker, None)
        self._handed[worker] = self._round  # it is invited, so its next push counts
        self._expect(worker, t)
        return [Invite(worker), *self._settle(t)]

    def _comes_back(self, arrival: Arrival) -> bool:
        if self._times.normal(arrival):
            return True
        waited = self._round - self._out[arrival.worker]
        return self._times.computes_normally(arrival) and waited >= self._retry

    def leave(self, worker: int, t: float) -> list[Decision]:
        self._active.discard(worker)
        self._missing.pop(worker, None)
        self._released.pop(worker, None)
        self._take_back(t)
        return self._settle(t)

    def join(self, worker: int, t: float) -> list[Decision]:
        self._active.add(worker)
        self._handed[worker] = self._round
        if worker not in self._out:
            self._expect(worker, t)
        self._take_back(t)
        return self._settle(t)

    def tick(self, t: float) -> list[Decision]:
        self._wake_t = math.inf
        return self._settle(t)

    def state(self) -> dict[str, float]:
        return {"round": self._round, "left_out": len(self._active & self._out.keys())}

    def _expect(self, worker: int, t: float) -> None:
        """Wait for a worker that continues now."""
        self._missing[worker] = t + self._times.within_s(worker)

    def _take_back(self, t: float) -> None:
        """If all active workers are left out, take all of them back."""
        if self._active <= self._out.keys():
            for worker in self._active:
                del self._out[worker]
                self._expect(worker, t)

    def _settle(self, t: float, *, look: bool = True) -> list[Decision]:
        """End the round if it is complete; with `look`, leave out late members and schedule a check."""
        if not self._arrived:
            return []
        if look:
            for worker in [worker for worker, due in self._missing.items() if due <= t]:
                del self._missing[worker]
                self._out[worker] = self._round
        if not self._missing:
            return self._close(t)
        wake_t = min(self._missing.values()) if look else math.inf
        if wake_t == math.inf or t < self._wake_t <= wake_t:  # an earlier check is scheduled already
            return []
        self._wake_t = wake_t
        return [Wake(wake_t)]

    def _close(self, t: float) -> list[Decision]:
        arrivals = [self._arrived[worker] for worker in sorted(self._arrived)]
        slow = {arrival.worker for arrival in arrivals if not self._times.normal(arrival)}
        if self._active - self._out.keys() - slow:
            self._out.update(dict.fromkeys(slow, self._round))
        self._round += 1
        self._arrived = {}
        self._times.update()
        for worker in (arrival.worker for arrival in arrivals):
            self._handed[worker] = self._round
            self._released[worker] = t
            if worker not in self._out:
                self._expect(worker, t)
        return [mean(arrivals), *(Release(a.worker, ask=a.worker in self._out) for a in arrivals)]
