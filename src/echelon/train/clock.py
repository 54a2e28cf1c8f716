"""Where a worker's time goes, step by step, without changes to the training loop.

The loader reports when the loop requests a batch and when it gets one. The reducer reports when this worker
arrives at the round and when the result has arrived. The optimizer reports when it begins and ends. A step
ends when the loop requests the next batch. If one batch serves several steps, or the script reads data of
its own, a step ends with the first gradient after all optimizers have stepped. A batch without an optimizer
step (an evaluation) belongs to no step.
"""

from __future__ import annotations

import random
import time

from torch import Tensor

from echelon.cluster.delay import Delay
from echelon.cluster.pace import Pace
from echelon.observe.events import BucketReduced, StepEnded
from echelon.observe.recorder import Recorder
from echelon.reduce.reducer import BucketTimes


class _StepTimes:
    """The current step. Instants are on the performance counter."""

    __slots__ = (
        "applied_at", "apply_s", "applying", "arrival", "asked", "batch", "by", "compute_s", "computing",
        "data_s", "delay_due", "delay_s", "handed", "learning", "loss", "rounds", "sent_bytes", "share",
        "start", "wait_s",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.start = self.asked = self.handed = self.arrival = self.applying = self.applied_at = now
        self.data_s = self.compute_s = self.wait_s = self.apply_s = self.delay_s = 0.0
        self.share = self.batch = self.sent_bytes = self.rounds = 0
        self.computing = self.learning = self.delay_due = False
        self.by: set[int] = set()  # the optimizers that have stepped
        self.loss: Tensor | float | None = None


class StepClock:
    """Measures one step at a time and records it. One per worker."""

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        *,
        pace: Pace | None = None,
        delay: Delay | None = None,
        seed: int = 0,
    ) -> None:
        self._recorder = recorder
        self._rank = rank
        self._pace = pace
        self._delay = delay
        self._draw = random.Random(f"{seed}/{rank}")
        self._offset = time.time() - time.perf_counter()
        self._now = _StepTimes(time.perf_counter())
        self.epoch = 0
        self.step = 0
        self.optimizers = 0

    def data_asked(self) -> None:
        """The loop requests the next batch: the previous step is over."""
        now = time.perf_counter()
        if self._now.by:
            self.close()
        elif not self._now.learning:
            self._now = _StepTimes(now)
        self._now.asked = now

    def data_handed(self, share: int, batch: int) -> None:
        """The loop gets a batch; computing begins."""
        step = self._now
        step.handed = time.perf_counter()
        step.data_s += step.handed - step.asked
        step.share += share
        step.batch += batch
        self._begin_computing()

    def _begin_computing(self) -> None:
        self._now.computing = True
        self._now.delay_due = self._delay is not None
        if self._pace is not None:
            self._pace.start()

    def computing(self) -> None:
        """A gradient is ready. Injected delays and emulated slowness take effect here."""
        if self._now.by and len(self._now.by) >= self.optimizers:
            self._go_on()
        step = self._now
        step.learning = True
        if not step.computing:
            return
        if step.delay_due and self._delay is not None:
            step.delay_due = False
            pause_s = self._delay.sample(self._draw)
            step.delay_s += pause_s
            time.sleep(pause_s)
        if self._pace is not None:
            step.delay_s += self._pace.catch_up()

    def _go_on(self) -> None:
        """Begin another step where the last one ended, without a request for data."""
        ended = self._now.applied_at
        self.close()
        self._now = _StepTimes(ended)
        self._begin_computing()

    def _computed(self) -> None:
        """Add the time since the last measurement to the computing time."""
        self.computing()
        step = self._now
        now = time.perf_counter()
        if step.computing or step.rounds:
            step.compute_s += now - step.handed
        step.computing = False
        step.handed = now

    def arrived(self) -> None:
        """This worker has all its gradients and waits for the other workers'."""
        self._computed()
        self._now.arrival = self._now.handed

    def bucket(self, times: BucketTimes) -> None:
        """One bucket of the round has been reduced."""
        offset = self._offset
        self._recorder.emit(
            BucketReduced(
                t=offset + time.perf_counter(),
                rank=self._rank,
                # The step counts when its first optimizer is done; a later optimizer may have a round too.
                step=self.step - 1 if self._now.by else self.step,
                index=times.index,
                size_bytes=times.size_bytes,
                sent_bytes=times.sent_bytes,
                start=offset + times.filled_at,
                encode_s=times.encode_s,
                begun=offset + times.begun if times.begun else 0.0,
                sent=offset + times.sent if times.sent else 0.0,
                ended=offset + times.ended if times.ended else 0.0,
                adding_s=times.adding_s,
                wait_s=times.wait_s,
                how=times.how,
                coded_bytes=times.coded_bytes,
            )
        )

    def reduced(self, sent_bytes: int) -> None:
        """The round's result has arrived. Computing of another backward pass would begin here."""
        step = self._now
        step.handed = time.perf_counter()
        step.wait_s += step.handed - step.arrival
        step.sent_bytes += sent_bytes
        step.rounds += 1

    def waited(self, wait_s: float) -> None:
        """The trainer waited for gradients of the previous round, which is not computing."""
        self._now.wait_s += wait_s
        self._now.handed += wait_s

    def averaged(self, sent_bytes: int) -> None:
        """Weights were averaged with other workers'."""
        self._now.sent_bytes += sent_bytes

    def kept(self) -> None:
        """Backward ended without a round; its gradients stay for a later round."""
        self._computed()

    def applying(self, optimizer: int = 0) -> None:
        """An optimizer begins its step. Several optimizers share a step until one of them steps again."""
        if optimizer in self._now.by:
            self._go_on()
        if self._now.computing and not self._now.rounds:  # alone, there is no round to arrive at
            self.arrived()
        self._now.applying = time.perf_counter()

    def applied(self, optimizer: int = 0) -> None:
        """The optimizer is done."""
        step = self._now
        step.applied_at = time.perf_counter()
        step.apply_s += step.applied_at - step.applying
        if not step.by:
            self.step += 1
        step.by.add(optimizer)

    def note_loss(self, loss: Tensor | float) -> None:
        """Keep the loss of the current batch; it is read when the step is recorded."""
        self._now.loss = loss.detach() if isinstance(loss, Tensor) else loss

    def close(self) -> None:
        """Record the step, if there was one, and begin the next."""
        step = self._now
        now = time.perf_counter()
        self._now = _StepTimes(now)
        if not step.by:
            return
        self._recorder.emit(
            StepEnded(
                t=self._offset + now,
                rank=self._rank,
                step=self.step - 1,
                epoch=self.epoch,
                start=self._offset + step.start,
                data_s=step.data_s,
                compute_s=step.compute_s,
                arrival=self._offset + step.arrival,
                wait_s=step.wait_s,
                apply_s=step.apply_s,
                share=step.share,
                batch=step.batch,
                sent_bytes=step.sent_bytes,
                loss=None if step.loss is None else float(step.loss),
                delay_s=step.delay_s,
            )
        )
