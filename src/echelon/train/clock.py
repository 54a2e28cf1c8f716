"""Where a worker's time goes, step by step, without changes to the training loop.

The loader reports when the loop requests a batch and when it gets one. The reducer reports when this worker
arrives at the round and when the result has arrived. The optimizer reports when it begins and ends. A step
ends when the loop requests the next batch. If one batch serves several steps, or the script reads data of
its own, a step ends with its last optimizer; this is known at the first gradient or exchange after it. A
batch without an optimizer step (an evaluation) belongs to no step.

Workers also meet within forward and backward (statistics of batch normalisation), after the optimizer
(averages of weights), and at several rounds if there are several backward passes. Each of these exchanges
is recorded, and waiting there counts as waiting, not as computing: a late worker is found by its arrival at
every place where others wait for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from echelon.cluster.delay import Delay
from echelon.cluster.pace import Pace
from echelon.observe.events import BucketReduced, PassesTimed, StageAssigned, StepEnded
from echelon.observe.recorder import Recorder
from echelon.parallel.pass_times import TimedPass
from echelon.reduce.reducer import BucketTimes
from echelon.train.thread_times import ThreadTimes

_MOST_EXCHANGES = 8  # in the record of a step


class _StepTimes:
    """The current step. Instants are on the performance counter."""

    __slots__ = (
        "applied_at", "apply_s", "applying", "arrival", "asked", "asking", "batch", "by",
        "compute_s", "computing", "data_s", "deferred_s", "delay_due", "delay_s", "exchanges", "handed",
        "learning", "loss", "round", "rounds", "sent_bytes", "share", "spent_s", "start", "wait_s",
        "waited",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.start = self.asked = self.handed = self.arrival = self.applying = self.applied_at = now
        self.data_s = self.compute_s = self.wait_s = self.apply_s = self.delay_s = self.deferred_s = 0.0
        self.spent_s = 0.0  # computing and waiting before the optimizer began
        self.share = self.batch = self.sent_bytes = self.rounds = 0
        self.computing = self.learning = self.delay_due = self.asking = False
        self.by: set[int] = set()  # the optimizers that have stepped
        self.loss: Tensor | float | None = None
        self.exchanges: list[tuple[float, float]] = []  # begin and end
        self.round: tuple[float, float] | None = None  # the last one
        self.waited: tuple[float, float] | None = None  # the last wait that was reported by itself

    def exclude(self, waited_s: float) -> None:
        """Do not count this time, which has just passed, as waiting for data or as computing."""
        if self.asking:
            self.asked += waited_s
        else:
            self.handed += waited_s


class StepClock:
    """Measures one step at a time and records it. One per worker.

    Without `thread_times` it does not measure whether the thread had a core. `on_begun` is called when
    training begins.
    """

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        *,
        pace: Pace | None = None,
        delay: Delay | None = None,
        seed: int = 0,
        thread_times: ThreadTimes | None = None,
        on_begun: Callable[[], None] | None = None,
    ) -> None:
        self._thread = thread_times
        self._averages = False
        self._on_begun = on_begun
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
        self.counts_samples = True  # False: another worker counts the same samples
        self.waited_s = 0.0  # for other workers, in all steps
        self.records = True  # False: steps count for nothing, since this worker is left out
        self.on_ended: Callable[[float, float, int], None] | None = None
        """Called at the end of a step: seconds of data and computing, of waiting, and its global batch."""

    def begun(self) -> None:
        """The script works on its first batch, or asks for it; `on_begun` is called the first time."""
        if self._on_begun is not None:
            on_begun, self._on_begun = self._on_begun, None
            on_begun()

    def data_asked(self) -> None:
        """The loop requests the next batch: the previous step is over."""
        self.begun()
        now = time.perf_counter()
        if self._now.by:
            self.close()
        elif not self._now.learning:
            self._now = _StepTimes(now)
            if self._thread is not None:
                self._thread.take()
        self._now.asked = now
        self._now.asking = True

    def data_handed(self, share: int, batch: int) -> None:
        """The loop gets a batch; computing begins."""
        step = self._now
        step.handed = time.perf_counter()
        step.asking = False
        step.data_s += step.handed - step.asked
        step.share += share if self.counts_samples else 0
        step.batch += batch
        self._begin_computing()

    def _begin_computing(self) -> None:
        self._now.computing = True
        self._now.delay_due = self._delay is not None
        if self._pace is not None:
            self._pace.start()

    def computing(self) -> None:
        """A gradient is ready. Injected delays and emulated slowness take effect here."""
        self.begun()
        self._go_on_if_over()
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

    def _go_on_if_over(self) -> None:
        """Begin another step, without a request for data, if all optimizers have stepped."""
        if self._now.by and len(self._now.by) >= self.optimizers:
            self._go_on()

    def _go_on(self) -> None:
        """Begin another step where the last one ended."""
        self._end(self._now.applied_at)
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
        self._go_on_if_over()
        if self._thread is not None:
            self._thread.hold()
        self._arrive()

    def _arrive(self) -> None:
        self._computed()
        self._now.arrival = self._now.handed

    def bucket(self, times: BucketTimes) -> None:
        """One bucket of the round has been reduced."""
        if not self.records:
            return
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

    def staged(self, **fields: Any) -> None:
        """This worker has a stage of a pipeline; the fields are those of the event."""
        self._recorder.emit(StageAssigned(t=time.time(), rank=self._rank, **fields))

    def passed(
        self, begun: float, passes: Sequence[TimedPass], memory_bytes: int, chunks: Sequence[int]
    ) -> None:
        """Micro-batches have gone through this worker's stage, since `begun` on the performance counter."""
        self._recorder.emit(
            PassesTimed(
                t=self._offset + time.perf_counter(),
                rank=self._rank,
                step=self.step - 1 if 0 < len(self._now.by) < self.optimizers else self.step,
                start=self._offset + begun,
                passes=list(passes),
                memory_bytes=memory_bytes,
                chunks=list(chunks),
            )
        )

    def reduced(self, sent_bytes: int) -> None:
        """The round's result has arrived. Computing of another backward pass would begin here."""
        step = self._now
        if self._thread is not None:
            self._thread.resume()
        step.handed = time.perf_counter()
        self._wait(step.handed - step.arrival)
        step.sent_bytes += sent_bytes
        step.rounds += 1
        if step.round is not None:  # the event has a place for the last round only
            step.exchanges.append(step.round)
        step.round = step.arrival, step.handed

    @contextmanager
    def exchange(self, *, begins_step: bool = True) -> Iterator[None]:
        """In the block, this worker meets the others: nobody leaves before the last has come.

        `begins_step`: if all optimizers have stepped, it belongs to the next step, as a forward pass does.
        """
        if begins_step:
            self._go_on_if_over()
        if self._thread is not None:
            self._thread.hold()
        begun = time.perf_counter()
        yield
        if self._thread is not None:
            self._thread.resume()
        ended = time.perf_counter()
        self._wait(ended - begun)
        self._now.exchanges.append((begun, ended))
        self._now.exclude(ended - begun)

    def waited(self, wait_s: float) -> None:
        """The trainer has just waited for results of the round before, which is not computing."""
        step = self._now
        now = time.perf_counter()
        step.waited = now - wait_s, now
        self._wait(wait_s)
        step.deferred_s += wait_s
        step.exclude(wait_s)

    def _wait(self, seconds: float) -> None:
        self._now.wait_s += seconds
        self.waited_s += seconds

    def averaged(self, sent_bytes: int) -> None:
        """Weights were averaged with other workers': the wait reported last was this exchange."""
        step = self._now
        step.sent_bytes += sent_bytes
        self._averages = True
        if self._thread is not None:
            self._thread.forget()
        if step.waited is not None:
            begun, ended = step.waited
            step.exchanges.append(step.waited)
            step.deferred_s = max(0.0, step.deferred_s - (ended - begun))
            step.waited = None

    def kept(self) -> None:
        """Backward ended without a round; its gradients stay for a later round."""
        self._computed()

    def applying(self, optimizer: int = 0) -> None:
        """An optimizer begins its step. Several optimizers share a step until one of them steps again."""
        self.begun()
        if optimizer in self._now.by:
            self._go_on()
        if self._now.computing and not self._now.rounds:  # alone, there is no round to arrive at
            self._arrive()
        if self._thread is not None:
            self._thread.resume()
        self._now.applying = time.perf_counter()
        self._now.spent_s = self._now.compute_s + self._now.wait_s

    def applied(self, optimizer: int = 0) -> None:
        """The optimizer is done."""
        step = self._now
        step.applied_at = time.perf_counter()
        # A closure computes and waits within the optimizer's step.
        closure_s = step.compute_s + step.wait_s - step.spent_s
        step.apply_s += max(0.0, step.applied_at - step.applying - closure_s)
        if not step.by:
            self.step += 1
        step.by.add(optimizer)
        if self._averages and self._thread is not None:
            self._thread.mark()

    def note_loss(self, loss: Tensor | float) -> None:
        """Keep the loss of the current batch; it is read when the step is recorded."""
        self._now.loss = loss.detach() if isinstance(loss, Tensor) else loss

    def close(self) -> None:
        """Record the step, if there was one, and begin the next."""
        self._end(time.perf_counter())

    def _end(self, now: float) -> None:
        step = self._now
        cpu_s, starved_s = self._thread.take() if self._thread is not None else (None, None)
        self._now = _StepTimes(now)
        if not step.by or not self.records:
            return
        if self.on_ended is not None:
            self.on_ended(step.data_s + step.compute_s, step.wait_s, step.batch)
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
                exchanges_us=exchanges_us(step.start, step.exchanges) if step.exchanges else [],
                deferred_s=step.deferred_s,
                cpu_s=cpu_s,
                starved_s=starved_s,
            )
        )


def exchanges_us(start: float, exchanges: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
    """The exchanges as an event has them: the time before each and the time in it, in microseconds.

    All workers make the same exchanges in a step, so all merge the same ones.
    """
    listed = []
    free_from = 0
    for begun, ended in sorted(exchanges):
        before = max(free_from, round((begun - start) * 1e6))
        after = max(before, round((ended - start) * 1e6))
        listed.append((before - free_from, after - before))
        free_from = after
    while len(listed) > _MOST_EXCHANGES:
        pairs = [listed[at : at + 2] for at in range(0, len(listed), 2)]
        listed = [(sum(own for own, _ in pair), sum(wait for _, wait in pair)) for pair in pairs]
    return listed
