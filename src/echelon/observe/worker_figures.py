"""One worker's figures, from its steps: of a whole run, or of a part of it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from echelon.observe.events import StepEnded
from echelon.observe.lateness import Lateness
from echelon.observe.spans import length_s, other_s


class WorkerSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's figures.

    `step_s` is the time this worker spent in steps, the sum of the five parts from `data_s` to `other_s`;
    `samples_per_s` is relative to it. `late_s` is the part of `wait_s` before the last worker arrived; the
    rest of it is the exchange itself. `held_up_s` is how long this worker kept the others waiting,
    `alone_s` the part of that in which only it was missing, and `late_result_s` the part that began with a
    result that reached it late; arrival.py has the definitions. `rounds` counts the worker's rounds that
    were judged, `times_last` those in which it kept the others waiting longest, and `steady` is the share
    of them in which it was about as late as usual; lateness.py has the definition.

    Of `own_s`, the time in steps but for waiting, the training thread was `cpu_s` on a core and `starved_s`
    ready without one; None if unknown, `cpu_s` also if another device computes.
    """

    rank: int
    node: str
    steps: int
    samples: int
    mean_share: float
    samples_per_s: float
    step_s: float
    data_s: float
    compute_s: float
    wait_s: float
    apply_s: float
    other_s: float
    late_s: float
    delay_s: float
    sent_bytes: int
    times_last: int
    held_up_s: float
    alone_s: float
    rounds: int = 0
    late_result_s: float = 0.0
    steady: float = 0.0
    cpu_s: float | None = None
    starved_s: float | None = None

    @property
    def own_s(self) -> float:
        """The time in steps that was not spent waiting for other workers."""
        return max(0.0, self.step_s - self.wait_s)

    @property
    def idle_s(self) -> float | None:
        """Own time in which the thread neither ran nor wanted to: it slept, or waited for something else.

        Injected delays are not counted; None if unknown.
        """
        if self.cpu_s is None or self.starved_s is None:
            return None
        return max(0.0, self.own_s - self.cpu_s - self.starved_s - self.delay_s)


@dataclass(slots=True)
class WorkerSums:
    """One worker's sums over its steps, so far."""

    node: str = ""
    device: str = ""
    steps: int = 0
    samples: int = 0
    step_s: float = 0.0
    data_s: float = 0.0
    compute_s: float = 0.0
    wait_s: float = 0.0
    apply_s: float = 0.0
    other_s: float = 0.0
    delay_s: float = 0.0
    sent_bytes: int = 0
    exchanges: int = 0
    cpu_s: float | None = 0.0
    starved_s: float | None = 0.0

    def add(self, event: StepEnded) -> None:
        """Take one step into account."""
        self.steps += 1
        self.exchanges += event.sent_bytes > 0
        self.samples += event.share
        self.step_s += length_s(event)
        self.data_s += event.data_s
        self.compute_s += event.compute_s
        self.wait_s += event.wait_s
        self.apply_s += event.apply_s
        self.other_s += other_s(event)
        self.delay_s += event.delay_s
        self.sent_bytes += event.sent_bytes
        self.cpu_s = _plus(self.cpu_s, event.cpu_s)
        self.starved_s = _plus(self.starved_s, event.starved_s)


def _plus(sum_s: float | None, seconds: float | None) -> float | None:
    """A sum that is unknown if one of its parts is."""
    return None if sum_s is None or seconds is None else sum_s + seconds


def worker_summary(rank: int, worker: WorkerSums, lateness: Lateness) -> WorkerSummary:
    """The figures of these sums; `lateness` is that of the same steps."""
    late = lateness.of(rank)
    return WorkerSummary(
        rank=rank,
        node=worker.node,
        steps=worker.steps,
        samples=worker.samples,
        mean_share=_ratio(worker.samples, worker.steps),
        samples_per_s=_ratio(worker.samples, worker.step_s),
        step_s=worker.step_s,
        data_s=worker.data_s,
        compute_s=worker.compute_s,
        wait_s=worker.wait_s,
        apply_s=worker.apply_s,
        other_s=worker.other_s,
        late_s=late.late_s,
        delay_s=worker.delay_s,
        sent_bytes=worker.sent_bytes,
        times_last=late.times_last,
        held_up_s=late.held_up_s,
        alone_s=late.alone_s,
        rounds=late.rounds,
        late_result_s=late.late_result_s,
        steady=late.steady,
        # On another device the thread waits for its own computation.
        cpu_s=worker.cpu_s if worker.steps and worker.device in ("", "cpu") else None,
        starved_s=worker.starved_s if worker.steps else None,
    )


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0
