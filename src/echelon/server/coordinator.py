"""Asks a policy's rule about every arrival of one table, and turns its decisions into orders.

The coordinator knows when a push is complete (every server that keeps a part of it has said so), which
workers wait, and the version of the weights. It records every arrival and every decision, so a run can be
replayed.

A worker that rests (for a checkpoint) is soon back. The rule is told that it left only if another worker
would otherwise wait for it. If all present workers rest, the rule is told nothing and no round ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from echelon.observe.events import Arrived, Decided
from echelon.observe.recorder import Recorder
from echelon.server.protocol import Freed, Order, PushInfo
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Drop,
    Invite,
    Release,
    Rule,
    Wake,
    WeightedPush,
)


@dataclass(slots=True)
class _Push:
    """A push that is not complete yet."""

    info: PushInfo | None = None
    holders: int = 0
    square: float = 0.0
    dot: float = 0.0


class Coordinator:
    """The coordinator of one table.

    `holders` is how many servers keep a part of a push, replicas included. `now` is a monotonic time of
    day.
    """

    def __init__(
        self,
        rule: Rule,
        *,
        workers: Sequence[int],
        holders: int,
        now: Callable[[], float],
        recorder: Recorder,
        rank: int,
        table: int = 0,
    ) -> None:
        self._rule = rule
        self._holders = holders
        self._now = now
        self._recorder = recorder
        self._rank = rank
        self._table = table
        self._number = {
            worker: index for index, worker in enumerate(workers)
        }  # the policy's numbers of workers
        self._worker = list(workers)
        self._pushes: dict[tuple[int, int], _Push] = {}
        self._arrived: dict[int, tuple[float, PushInfo]] = {}
        self._present = set(workers)
        self._resting: set[int] = set()  # of those present
        self._wakes: list[float] = []
        self.version = 0

    @property
    def next_wake_s(self) -> float | None:
        """Seconds until the rule wants to be asked again."""
        return max(0.0, self._wakes[0] - self._now()) if self._wakes else None

    def awaited(self, asker: int = -1) -> list[int]:
        """The ranks that take part and have not arrived, without `asker` and without resting workers."""
        return sorted(self._present - set(self._arrived) - self._resting - {asker})

    def done(self, worker: int, step: int, info: PushInfo) -> list[Order]:
        """A worker has sent all of a push."""
        push = self._pushes.setdefault((worker, step), _Push())
        push.info = info
        return self._complete(worker, step, push)

    def held(self, worker: int, step: int, square: float, dot: float) -> list[Order]:
        """A server holds all of its part of a push."""
        push = self._pushes.setdefault((worker, step), _Push())
        push.holders += 1
        push.square += square
        push.dot += dot
        return self._complete(worker, step, push)

    def _complete(self, worker: int, step: int, push: _Push) -> list[Order]:
        if push.info is None or push.holders < self._holders:
            return []
        del self._pushes[worker, step]
        return self._arrive(worker, step, push.info, push.square, push.dot)

    def ask(self, worker: int, step: int, info: PushInfo) -> list[Order]:
        """A worker asks whether to push."""
        return self._arrive(worker, step, msgspec.structs.replace(info, kind="ask"), 0.0, 0.0)

    def _arrive(self, worker: int, step: int, info: PushInfo, square: float, dot: float) -> list[Order]:
        joined = self.join(worker)  # a worker that left may arrive again without joining first
        t = self._now()
        self._arrived[worker] = (t, info)
        arrival = Arrival(
            worker=self._number[worker],
            step=step,
            t=t,
            kind=info.kind,
            read=info.read,
            samples=info.samples,
            compute_s=info.compute_s,
            transfer_s=info.transfer_s,
            square=square,
            dot=dot,
        )
        self._recorder.emit(
            Arrived(
                t=t,
                rank=self._rank,
                worker=arrival.worker,
                kind=info.kind,
                table=self._table,
                step=step,
                version=self.version,
                read=info.read,
                samples=info.samples,
                compute_s=info.compute_s,
                transfer_s=info.transfer_s,
                square=square,
                dot=dot,
            )
        )
        return joined + self._carry_out(self._rule.arrive(arrival)) + self._leave_if_awaited()

    def leave(self, worker: int) -> list[Order]:
        """A worker takes no part for now."""
        if worker not in self._present:
            return []
        return self._leave(worker) + self._leave_if_awaited()

    def _leave(self, worker: int) -> list[Order]:
        self._present.discard(worker)
        self._resting.discard(worker)
        self._arrived.pop(worker, None)
        t = self._now()
        self._record_arrival("leave", self._number[worker], t)
        return self._carry_out(self._rule.leave(self._number[worker], t))

    def rest(self, worker: int) -> list[Order]:
        """A worker pauses; all others will pause too, unless they wait for it."""
        if worker not in self._present:
            return []
        self._resting.add(worker)
        return self._leave_if_awaited()

    def _leave_if_awaited(self) -> list[Order]:
        """If some workers wait and all others rest, the resting workers leave."""
        waiting = self._present & self._arrived.keys()
        if not waiting or self._present - waiting - self._resting:
            return []
        return [order for worker in sorted(self._resting) for order in self._leave(worker)]

    def join(self, worker: int) -> list[Order]:
        """A worker takes part again."""
        self._resting.discard(worker)
        if worker in self._present:
            return []
        self._present.add(worker)
        t = self._now()
        self._record_arrival("join", self._number[worker], t)
        return self._carry_out(self._rule.join(self._number[worker], t))

    def tick(self) -> list[Order]:
        """Ask the rule again if one of its wake-up times has passed."""
        t = self._now()
        if not self._wakes or self._wakes[0] > t:
            return []
        while self._wakes and self._wakes[0] <= t:
            heapq.heappop(self._wakes)
        self._record_arrival("tick", -1, t)
        return self._carry_out(self._rule.tick(t))

    def _carry_out(self, decisions: Sequence[Decision]) -> list[Order]:
        orders: list[Order] = []
        for decision in decisions:
            order = self._order(decision)
            if order is not None:
                orders.append(order)
        return orders

    def _order(self, decision: Decision) -> Order | None:
        match decision:
            case Apply(parts):
                self.version += 1
                self._record_decision("apply", parts=[(p.worker, p.step, p.weight) for p in parts])
                return Apply(tuple(WeightedPush(self._worker[p.worker], p.step, p.weight) for p in parts))
            case Drop(worker, step, reason):
                self._record_decision("drop", worker=worker, step=step, reason=reason)
                return Drop(self._worker[worker], step, reason)
            case Release(number, fresh, ask):
                worker = self._worker[number]
                self._record_decision("release", worker=number, fresh=fresh, ask=ask)
                if worker not in self._arrived:
                    return None  # it has left
                since, info = self._arrived.pop(worker)
                return Freed(worker, fresh and info.wants_weights, ask, self.version, self._now() - since)
            case Invite(number):
                self._record_decision("invite", worker=number)
                self._arrived.pop(self._worker[number], None)
                return Invite(self._worker[number])
            case Wake(t):
                heapq.heappush(self._wakes, t)
                self._record_decision("wake", at=t)
                return None

    # Recording ----------------------------------------------------------------------------------

    def _record_arrival(self, kind: str, number: int, t: float) -> None:
        self._recorder.emit(
            Arrived(t=t, rank=self._rank, worker=number, kind=kind, table=self._table, version=self.version)
        )

    def _record_decision(self, what: str, **facts: Any) -> None:
        t, version = self._now(), self.version
        self._recorder.emit(
            Decided(t=t, rank=self._rank, what=what, table=self._table, version=version, **facts)
        )
