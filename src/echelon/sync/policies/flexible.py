"""Flexible: a worker that is slower than it should be is left out, until it is normal again.

Algorithms 2 and 3 of Wang and others, "Hierarchical Heterogeneous Cluster Systems for Scalable Distributed
Deep Learning", with rounds at a server. The members of a round are all workers that are not left out; when
they are there, the update is the mean over their samples, and they get new weights. A detector gives each
worker the longest time that still counts as normal, for computing (C) and for transfers (T) separately, by
what was known when the round began.

- Late: a member that is not there C + T after its release (plus the time that usually goes elsewhere) is
  left out of the round, if another member is there. If even the first comes late, the others have that
  long again from there on.
- Slow: a member that took more than C + T altogether counts in its round, for the others have waited for
  it, and is left out of the next. A long transfer that a short computation makes up for keeps nobody
  waiting, so it does not count as slow.
- Alone: a worker that is left out goes on with its own weights. A gradient that comes after its round is
  over is not applied: the worker makes a step of its own of it. Before each further step's end it asks.
- Back: when it would be in time by what its last step and last transfer took, it is invited to the round
  that is open. If it is its transfer that was slow, nobody can know without a transfer, so it is invited
  again after `retry` rounds. It brings how its weights have changed since it got some, and this delta,
  times its part of the samples, is added: newer weights are never overwritten. A delta is never too late.

If all members are slow at once nobody is, and if only workers that were left out remain they are taken
back, so every round has a member.
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
    """A worker that is slower than it should be is left out until it is normal again.

    `detector` judges times of computing, `transfer` those of transfers (the same detector unless given). A
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
            raise ConfigError(f"retry is {self.retry}", where="retry", fix="give 1 round or more")

    def check(self, cluster: ClusterInfo) -> None:
        """Needs a server."""
        needs_server(self, cluster)

    def rule(self, cluster: ClusterInfo) -> Rule:
        """Rounds of those who are normal."""
        compute, transfer = self._detectors()
        return _Normal(_Times(cluster.workers, compute, transfer), cluster.workers, self.retry)

    def _detectors(self) -> tuple[Detector, Detector]:
        compute = DETECTORS.build(self.detector, where="detector")
        return compute, DETECTORS.build(self.transfer, where="transfer") if self.transfer else compute


class _Times:
    """How long workers took, and what still counts as normal; limits change only when told to."""

    def __init__(self, workers: int, compute: Detector, transfer: Detector) -> None:
        self._detectors = compute, transfer
        self._compute_s: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(workers)]
        self._transfer_s: list[deque[float]] = [deque(maxlen=KEPT) for _ in range(workers)]
        self._rests_s: deque[float] = deque([0.0], maxlen=4 * workers)
        self._last_step = [-1] * workers
        self.update()

    def update(self) -> None:
        """Make the limits follow from all times up to now."""
        self._compute_limits = self._detectors[0].limits(self._compute_s)
        self._transfer_limits = self._detectors[1].limits(self._transfer_s)
        self._rest_s = median(self._rests_s)

    def note(self, arrival: Arrival, released: float | None) -> None:
        """Remember the times of an arrival, which came as an answer to a release."""
        if self._last_step[arrival.worker] != arrival.step:  # a push that was asked for was noted by then
            self._compute_s[arrival.worker].append(arrival.compute_s)
            self._last_step[arrival.worker] = arrival.step
        if arrival.kind == "ask":
            return
        self._transfer_s[arrival.worker].append(arrival.transfer_s)
        if released is not None:
            rest_s = arrival.t - released - arrival.compute_s - arrival.transfer_s
            self._rests_s.append(max(0.0, rest_s))

    def within_s(self, worker: int) -> float:
        """How long after its release a worker is there, if all is normal."""
        return self._limit_s(worker) + self._rest_s

    def normal(self, arrival: Arrival) -> bool:
        """Whether it is in time; an ask knows nothing newer than the worker's last transfer."""
        transfer_s = arrival.transfer_s
        if arrival.kind == "ask":
            past = self._transfer_s[arrival.worker]
            transfer_s = past[-1] if past else 0.0
        return arrival.compute_s + transfer_s <= self._limit_s(arrival.worker)

    def computes_normally(self, arrival: Arrival) -> bool:
        """Whether the time of computing alone is normal."""
        return arrival.compute_s <= self._compute_limits[arrival.worker]

    def _limit_s(self, worker: int) -> float:
        return self._compute_limits[worker] + self._transfer_limits[worker]


class _Normal(Rule):
    """The rounds of one run.

    `_missing` are the members that are not there yet, with when they have to be; `_out` the workers that
    are left out, with the round since when; `_handed` in which round a worker last got weights to push a
    gradient for; `_released` when, until it is told anything else.
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
        if worker in self._missing:  # taken back meanwhile: the others wait for what it does next
            self._expect(worker, arrival.t)
        reason = f"left out of round {self._handed[worker]}"
        return [Drop(worker, arrival.step, reason), Release(worker, fresh=False, ask=True)]

    def _ask(self, arrival: Arrival) -> list[Decision]:
        worker, t = arrival.worker, arrival.t
        if worker in self._out and not self._comes_back(arrival):
            return [Release(worker, fresh=False, ask=True)]
        self._out.pop(worker, None)
        self._handed[worker] = self._round  # invited, so whatever it pushes is welcome
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
        """Wait for a worker that goes on now."""
        self._missing[worker] = t + self._times.within_s(worker)

    def _take_back(self, t: float) -> None:
        """If all that take part are left out, none of them is."""
        if self._active <= self._out.keys():
            for worker in self._active:
                del self._out[worker]
                self._expect(worker, t)

    def _settle(self, t: float, *, look: bool = True) -> list[Decision]:
        """End the round if it is over; `look` for members that are late, and for when one will be."""
        if not self._arrived:
            return []
        if look:
            for worker in [worker for worker, due in self._missing.items() if due <= t]:
                del self._missing[worker]
                self._out[worker] = self._round
        if not self._missing:
            return self._close(t)
        wake_t = min(self._missing.values()) if look else math.inf
        if wake_t == math.inf or t < self._wake_t <= wake_t:  # a call that is to come is early enough
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
