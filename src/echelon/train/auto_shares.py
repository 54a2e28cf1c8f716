"""Shares that follow the workers' speeds: exchanges what steps took, and changes shares between batches.

Every few steps each worker sends how long its steps took, in the background, and reads the others' one step
later. All workers have the same numbers, so all take the same decision (plan/balance.py). Only when shares
change do they wait for each other: they agree on the first batch of each loader that nobody has drawn yet.
The global batches stay the same, and so do the gradients, to rounding.

How often: so that it costs less than a hundredth of a step. The first steps, which warm caches up, and the
first half second are not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.config.units import show_seconds
from echelon.observe.events import SharesChanged
from echelon.plan.balance import Balancer, ShareChange, StepReport
from echelon.plan.shares import ShareTable
from echelon.train.clock import StepClock
from echelon.train.families.synchronizer import Explain
from echelon.train.loader import SharedLoader

_WARM_UP_STEPS = 3
_WARM_UP_S = 0.5
_EVERY_S = 0.05
_FEWEST, _MOST = 2, 256  # steps between exchanges
_NUMBERS = 3


class AutoShares:
    """Adapts the shares of one run, on one worker. All workers call it alike.

    `loaders` are those that are prepared; more may come.
    """

    def __init__(
        self,
        group: Group,
        table: ShareTable,
        loaders: Sequence[SharedLoader],
        clock: StepClock,
        emit: Callable[[SharesChanged], None],
        explain: Explain,
    ) -> None:
        self._group = group.fork()
        self._table = table
        self._loaders = loaders
        self._clock = clock
        self._emit = emit
        self._explain = explain
        self._balancer: Balancer | None = None
        self._drawn = 0  # the batch that was drawn last
        self._batch = 0  # of one draw, in a usual step
        self._usual = 0  # of a step: several draws, if gradients are accumulated
        self._times: list[float] = []
        self._steps = 0
        self._next_at = _WARM_UP_STEPS + _FEWEST
        self._measured_s = 0.0
        self._pending: Future[Tensor] | None = None

    def drew(self, batch: int) -> None:
        """A batch of this size was handed to the loop."""
        self._drawn = batch

    def step_ended(self, busy_s: float, batch: int) -> None:
        """A step took so long, without waiting; batches of another size than usual do not count."""
        if self._steps <= _WARM_UP_STEPS or not batch:
            return
        if not self._usual:
            self._usual = batch
        if batch == self._usual:
            self._batch = self._drawn
            self._times.append(busy_s)

    def stepped(self) -> None:
        """An optimizer step is done: send or read reports if it is time to."""
        self._steps += 1
        if self._pending is not None:
            self._take(self._pending.wait())
            self._pending = None
        elif self._steps >= self._next_at:
            self._pending = self._send()

    def _send(self) -> Future[Tensor]:
        report = StepReport.of(self._times)
        self._times = []
        told = torch.zeros(self._group.size, _NUMBERS, dtype=torch.float64)
        told[self._group.rank] = torch.tensor([report.steps, report.total, report.squares])
        return self._group.all_reduce(told.view(-1))

    def _take(self, told: Tensor) -> None:
        rows = told.view(-1, _NUMBERS).tolist()
        reports = [StepReport(steps=round(n), total=total, squares=squares) for n, total, squares in rows]
        if any(report.steps == 0 for report in reports):
            self._next_at = self._steps + _FEWEST
            self._usual = 0  # the loop may have changed its batch
            self._balancer = None
            return
        slowest_s = max(math.exp(report.mean) for report in reports)
        self._next_at = self._steps + min(_MOST, max(_FEWEST, math.ceil(_EVERY_S / slowest_s)))
        self._measured_s += slowest_s * reports[0].steps
        if self._measured_s < _WARM_UP_S:
            return
        if self._balancer is None:
            self._balancer = Balancer(self._batch, self._table.weights)
        change = self._balancer.take(reports)
        if change is not None:
            self._change(change)

    def _change(self, change: ShareChange) -> None:
        drawn = torch.tensor([loader.batches_drawn for loader in self._loaders], dtype=torch.int64)
        self._group.all_reduce(drawn, "max").wait()
        first = {loader.index: int(number) for loader, number in zip(self._loaders, drawn, strict=True)}
        self._table.change(change.shares, first)
        self._times = []
        self._record(change)

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
