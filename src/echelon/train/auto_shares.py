"""Shares that follow the workers' speeds: exchanges what steps took, and changes shares between batches.

Every few steps each worker tells how long its steps took. The numbers travel with the gradients, or, if no
bucket has room for them (codecs, half precision), in the background by themselves. All workers have the
same numbers, so all take the same decision (plan/balance.py). Only when shares change do they wait for each
other: they agree on the first batch of each loader that nobody has drawn yet. The global batches stay the
same, and so do the gradients, to rounding.

Where workers may be lost, other members than before begin anew with their reports. A member that is
interrupted gets the rows of a round that others have, so all still decide alike.

How often: every step, or every 20 ms if steps are shorter, so that it costs less than a hundredth of a
step. The first steps, which warm caches up, and the first half second are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.config.units import show_seconds
from echelon.errors import MismatchedCalls
from echelon.observe.events import SharesChanged
from echelon.plan.balance import Balancer, ShareChange, StepReport
from echelon.plan.congestion import TailWatch
from echelon.plan.shares import ShareTable
from echelon.reduce.piggyback import Piggyback, Seats
from echelon.train.clock import StepClock
from echelon.train.families.synchronizer import Explain
from echelon.train.loader import SharedLoader
from echelon.train.memory_room import MemoryRoom

_WARM_UP_STEPS = 3
_WARM_UP_S = 0.5
_EVERY_S = 0.02
_ALONE_EVERY_S = 0.05  # a message of its own costs more
_MOST = 256  # steps between reports
_EMPTY = 8  # reports without a usual step, after which the loop may have changed its batch
_NUMBERS = 5
_ROOM_EVERY = 256  # reports, after which memory is looked at again


class AutoShares:
    """Adapts the shares of one run, on one worker. All workers call it alike.

    `loaders` are those that are prepared; more may come. When shares change, `on_speeds` gets the speeds of
    all workers and the expected seconds of a step; it returns whether gradients travel in another way now.
    So does `on_congestion`, which is called when they travel slower or faster than before.
    """

    def __init__(
        self,
        group: Group,
        table: ShareTable,
        loaders: Sequence[SharedLoader],
        clock: StepClock,
        emit: Callable[[SharesChanged], None],
        explain: Explain,
        on_speeds: Callable[[Sequence[float], float], bool] = lambda speeds, step_s: False,
        on_congestion: Callable[[], bool] = lambda: False,
        room: MemoryRoom | None = None,
    ) -> None:
        self._group = group.fork()
        self._table = table
        self._loaders = loaders
        self._clock = clock
        self._emit = emit
        self._explain = explain
        self._on_speeds = on_speeds
        self._on_congestion = on_congestion
        self._tails = TailWatch()
        self._room = room
        self._most = 0
        self._told = 0
        self._balancer: Balancer | None = None
        self._drawn = 0  # the batch that was drawn last
        self._batch = 0  # of one draw, in a usual step
        self._usual = 0  # of a step: several draws, if gradients are accumulated
        self._times: list[float] = []
        self._waited_s = 0.0
        self._steps = 0
        self._taken = 0  # optimizer steps, of any optimizer
        self._empty = 0
        self._next_at = _WARM_UP_STEPS + 1
        self._view = 0  # in which the balancer's reports were told
        self.piggyback = Piggyback(self._seats, _NUMBERS, self._tell, lambda: self._taken)
        self._measured_s = 0.0
        self._pending: Future[Tensor] | None = None

    def _seats(self) -> Seats:
        changes = self._group.changes
        if changes is not None and changes.is_out:
            return Seats(0, 0, changes.number)
        return Seats(self._group.rank, self._group.size, changes.number if changes is not None else 0)

    def place(self) -> list[float]:
        """Where this worker is, for one that comes back to the run."""
        counts = [self._steps, self._taken, self._empty, self._next_at, self._measured_s]
        return [*counts, self._drawn, self._batch, self._usual]

    def go_to(self, place: Sequence[float]) -> None:
        """Go on where another worker is."""
        steps, taken, empty, next_at, self._measured_s, drawn, batch, usual = place
        self._steps, self._taken, self._empty, self._next_at = map(int, (steps, taken, empty, next_at))
        self._drawn, self._batch, self._usual = map(int, (drawn, batch, usual))
        self._forget()

    def drew(self, batch: int, share: int) -> None:
        """This worker's share of a batch of this size was handed to the loop."""
        self._drawn = batch
        if self._room is not None:
            self._room.drew(share)

    def step_ended(self, busy_s: float, waited_s: float, batch: int) -> None:
        """A step took so long, and waited so long; batches of another size than usual do not count."""
        if self._steps <= _WARM_UP_STEPS or not batch:
            return
        if not self._usual:
            self._usual = batch
        if batch == self._usual:
            self._batch = self._drawn
            self._times.append(busy_s)
            self._waited_s += waited_s

    def stepping(self, names: Mapping[int, str]) -> None:
        """An optimizer is about to step; raises if workers had taken different numbers of steps before."""
        if self.piggyback.apart is not None:
            raise different_steps(self.piggyback.apart, names)
        self._taken += 1

    def stepped(self) -> None:
        """An optimizer step is done: send or read reports if it is time to."""
        self._steps += 1
        if self.piggyback.is_carried:
            rows = self.piggyback.take()
        elif self._pending is not None:
            rows = self._pending.wait().view(-1, _NUMBERS).tolist()
            self._pending = None
        else:
            rows = None
        if rows is not None:
            self._take(rows)
        alone = not self.piggyback.is_carried and self._group.changes is None
        if alone and self._pending is None and self._steps >= self._next_at:
            self._pending = self._send()
            self._forget()

    def _tell(self) -> list[float] | None:
        """This worker's row, if it is time for a report."""
        if self._steps < self._next_at:
            return None
        report = StepReport.of(self._times, self._waited_s)
        if self._room is not None and self._told % _ROOM_EVERY == 0:
            self._most = self._room.most()
        self._told += 1
        return [report.steps, report.total, report.squares, report.waited_s, self._most]

    def _send(self) -> Future[Tensor]:
        told = torch.zeros(self._group.size, _NUMBERS, dtype=torch.float64)
        told[self._group.rank] = torch.tensor(self._tell(), dtype=torch.float64)
        return self._group.all_reduce(told.view(-1))

    def _take(self, rows: list[list[float]]) -> None:
        reports = [
            StepReport(steps=round(n), total=total, squares=squares, waited_s=waited_s)
            for n, total, squares, waited_s, _ in rows
        ]
        if self.piggyback.is_carried:
            self._forget()
        if self.piggyback.view != self._view:
            self._view, self._balancer = self.piggyback.view, None
        if any(report.steps == 0 for report in reports):
            self._empty += 1
            if self._empty >= _EMPTY:
                self._empty = 0
                self._usual = 0  # the loop may have changed its batch
                self._balancer = None
            return
        self._empty = 0
        slowest_s = max(math.exp(report.mean) for report in reports)
        every_s = _EVERY_S if self.piggyback.is_carried else _ALONE_EVERY_S
        self._next_at = self._steps + min(_MOST, math.ceil(every_s / slowest_s) - 1)
        self._measured_s += slowest_s * reports[0].steps
        if self._measured_s < _WARM_UP_S:
            return
        if self._balancer is None:
            self._balancer = Balancer(self._batch, [self._table.weights[slot] for slot in self._slots])
        change = self._balancer.take(reports, [round(row[4]) for row in rows])
        if change is not None:
            self._change(change)
        elif self._congested(reports, slowest_s) and self._on_congestion():
            self._balancer.forget_tails()

    @property
    def _slots(self) -> Sequence[int]:
        """The places in the table of those who told the last rows, by rank."""
        changes = self._group.changes
        return range(self._group.size) if changes is None else changes.members_of(self._view)

    def _weights(self, shares: Sequence[int]) -> list[float]:
        """New shares, and their mean for who was lost: if it comes back, it begins with that."""
        weights = [sum(shares) / len(shares)] * len(self._table.weights)
        for slot, share in zip(self._slots, shares, strict=True):
            weights[slot] = share
        return weights

    def _change(self, change: ShareChange) -> None:
        drawn = torch.tensor([loader.batches_drawn for loader in self._loaders], dtype=torch.int64)
        self._group.all_reduce(drawn, "max").wait()
        first = {loader.index: int(number) for loader, number in zip(self._loaders, drawn, strict=True)}
        self._table.change(self._weights(change.shares), first)
        self._forget()
        self._record(change)
        if self._on_speeds(change.speeds, change.expected_s) and self._balancer is not None:
            self._balancer.forget_tails()
            self._tails.reset()

    def _congested(self, reports: Sequence[StepReport], slowest_s: float) -> bool:
        tail_s = min(report.waited_s / report.steps for report in reports)
        return self._tails.take(tail_s, slowest_s + tail_s)

    def _forget(self) -> None:
        self._times = []
        self._waited_s = 0.0

    def _record(self, change: ShareChange) -> None:
        step = self._clock.step
        now, before = (",".join(map(str, shares)) for shares in (change.shares, change.before))
        why = (
            f"from step {step} on {now}, before {before}: rank {change.rank} took "
            f"{show_seconds(change.slowest_s)} for its share, now about {show_seconds(change.expected_s)}"
        )
        self._emit(
            SharesChanged(
                t=time.time(),
                rank=self._group.rank,
                step=step,
                shares=list(change.shares),
                before=list(change.before),
                slowest=change.rank,
                slowest_s=change.slowest_s,
                expected_s=change.expected_s,
            )
        )
        self._explain("shares", f"by measured speed; {why}", f"shares of a batch: {why}")


def different_steps(taken: Sequence[int], names: Mapping[int, str]) -> MismatchedCalls:
    """The error for workers of which some have skipped an optimizer step, or taken one more. Pure."""
    usual = max(set(taken), key=lambda count: (taken.count(count), count))
    odd = tuple(rank for rank, count in enumerate(taken) if count != usual)
    said = ", ".join(f"{names[rank]} {taken[rank]}" for rank in odd)
    return MismatchedCalls(
        f"workers have taken different numbers of optimizer steps: {said}, the others {usual}",
        ranks=odd,
        where=", ".join(names[rank] for rank in odd),
        fix="all workers must step after the same backward passes: look for `continue` and conditions on "
        "the rank or on a worker's own loss",
    )
