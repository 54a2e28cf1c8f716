"""Asks a policy's rule about every arrival of one table, and turns its decisions into orders.

It knows when a push is complete (every server that keeps a part of it has said so), who is waiting, and the
version of the weights. What it hears and what was decided is recorded, so a run can be replayed.

A worker that rests (for a checkpoint) is soon back. The rule hears of it only if somebody would wait for it
in vain meanwhile: if all who take part rest, no round is over for that.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from echelon.observe.events import Arrived, Decided
from echelon.observe.recorder import Recorder
from echelon.server.protocol import Done
from echelon.sync.families.serve import (
    Apply,
    Arrival,
    Decision,
    Drop,
    Invite,
    Kind,
    Release,
    Rule,
    Wake,
    WeightedPush,
)


@dataclass(slots=True)
class _Push:
    """A push that is not complete yet."""

    done: Done | None = None
    here: int = 0
    square: float = 0.0
    dot: float = 0.0


@dataclass(frozen=True, slots=True)
class Freed:
    """A worker may go on; `pull`: it gets weights."""

    worker: int
    pull: bool
    ask: bool
    version: int
    held_s: float


@dataclass(frozen=True, slots=True)
class HandOut:
    """A worker gets the weights as they are now, without the policy being asked.

    `look`: it goes on with those that it had.
    """

    worker: int
    look: bool = False


Order = Apply | Drop | Freed | HandOut | Invite


class Coordinator:
    """One table's. `now` tells the time of day, and never goes back."""

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
        self._number = {worker: index for index, worker in enumerate(workers)}  # as the policy counts
        self._worker = list(workers)
        self._pushes: dict[tuple[int, int], _Push] = {}
        self._arrived: dict[int, tuple[float, Done]] = {}
        self._present = set(workers)
        self._resting: set[int] = set()  # of those present
        self._wakes: list[float] = []
        self.version = 0

    @property
    def next_wake_s(self) -> float | None:
        """When the rule wants to be asked again, from now."""
        return max(0.0, self._wakes[0] - self._now()) if self._wakes else None

    def awaited(self, asker: int = -1) -> list[int]:
        """Those who take part and are not here, but for the one who asks, and those who make way."""
        return sorted(self._present - set(self._arrived) - self._resting - {asker})

    def done(self, worker: int, step: int, done: Done) -> list[Order]:
        """A worker has sent all of a push."""
        push = self._pushes.setdefault((worker, step), _Push())
        push.done = done
        return self._complete(worker, step, push)

    def have(self, worker: int, step: int, square: float, dot: float) -> list[Order]:
        """One who keeps a part of a push has all of that part."""
        push = self._pushes.setdefault((worker, step), _Push())
        push.here += 1
        push.square += square
        push.dot += dot
        return self._complete(worker, step, push)

    def _complete(self, worker: int, step: int, push: _Push) -> list[Order]:
        if push.done is None or push.here < self._holders:
            return []
        del self._pushes[worker, step]
        return self._arrive(worker, step, push.done, push.square, push.dot)

    def ask(self, worker: int, step: int, done: Done) -> list[Order]:
        """A worker wants to know whether to push."""
        return self._arrive(worker, step, msgspec.structs.replace(done, kind="ask"), 0.0, 0.0)

    def _arrive(self, worker: int, step: int, done: Done, square: float, dot: float) -> list[Order]:
        joined = self.join(worker)  # one that had left and steps again without a word
        t = self._now()
        self._arrived[worker] = (t, done)
        arrival = Arrival(
            worker=self._number[worker],
            step=step,
            t=t,
            kind=cast(Kind, done.kind),
            read=done.read,
            samples=done.samples,
            compute_s=done.compute_s,
            transfer_s=done.transfer_s,
            square=square,
            dot=dot,
        )
        self._recorder.emit(
            Arrived(
                t=t,
                rank=self._rank,
                worker=arrival.worker,
                kind=done.kind,
                table=self._table,
                step=step,
                version=self.version,
                read=done.read,
                samples=done.samples,
                compute_s=done.compute_s,
                transfer_s=done.transfer_s,
                square=square,
                dot=dot,
            )
        )
        return joined + self._carry_out(self._rule.arrive(arrival)) + self._make_way()

    def leave(self, worker: int) -> list[Order]:
        """A worker takes no part for now."""
        if worker not in self._present:
            return []
        return self._drop_out(worker) + self._make_way()

    def _drop_out(self, worker: int) -> list[Order]:
        self._present.discard(worker)
        self._resting.discard(worker)
        self._arrived.pop(worker, None)
        t = self._now()
        self._hear("leave", self._number[worker], t)
        return self._carry_out(self._rule.leave(self._number[worker], t))

    def rest(self, worker: int) -> list[Order]:
        """A worker pauses; all others will do so too, unless they wait for it."""
        if worker not in self._present:
            return []
        self._resting.add(worker)
        return self._make_way()

    def _make_way(self) -> list[Order]:
        """If all others rest, nobody may be waiting: those who rest leave then."""
        waiting = self._present & self._arrived.keys()
        if not waiting or self._present - waiting - self._resting:
            return []
        return [order for worker in sorted(self._resting) for order in self._drop_out(worker)]

    def join(self, worker: int) -> list[Order]:
        """A worker takes part again."""
        self._resting.discard(worker)
        if worker in self._present:
            return []
        self._present.add(worker)
        t = self._now()
        self._hear("join", self._number[worker], t)
        return self._carry_out(self._rule.join(self._number[worker], t))

    def tick(self) -> list[Order]:
        """Ask the rule what it wanted to be asked by now."""
        t = self._now()
        if not self._wakes or self._wakes[0] > t:
            return []
        while self._wakes and self._wakes[0] <= t:
            heapq.heappop(self._wakes)
        self._hear("tick", -1, t)
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
                self._say("apply", parts=[(p.worker, p.step, p.weight) for p in parts])
                return Apply(tuple(WeightedPush(self._worker[p.worker], p.step, p.weight) for p in parts))
            case Drop(worker, step, reason):
                self._say("drop", worker=worker, step=step, reason=reason)
                return Drop(self._worker[worker], step, reason)
            case Release(number, fresh, ask):
                worker = self._worker[number]
                self._say("release", worker=number, fresh=fresh, ask=ask)
                if worker not in self._arrived:
                    return None  # it has left
                since, done = self._arrived.pop(worker)
                return Freed(worker, fresh and done.pull, ask, self.version, self._now() - since)
            case Invite(number):
                self._say("invite", worker=number)
                self._arrived.pop(self._worker[number], None)
                return Invite(self._worker[number])
            case Wake(t):
                heapq.heappush(self._wakes, t)
                self._say("wake", at=t)
                return None

    # The record ----------------------------------------------------------------------------------

    def _hear(self, kind: str, number: int, t: float) -> None:
        self._recorder.emit(
            Arrived(t=t, rank=self._rank, worker=number, kind=kind, table=self._table, version=self.version)
        )

    def _say(self, what: str, **facts: Any) -> None:
        t, version = self._now(), self.version
        self._recorder.emit(
            Decided(t=t, rank=self._rank, what=what, table=self._table, version=version, **facts)
        )
