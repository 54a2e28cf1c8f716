"""The parts of a step's time, on a clock that the test controls."""

from __future__ import annotations

import time

import pytest
import torch

from echelon.cluster.delay import Delay
from echelon.cluster.pace import Pace
from echelon.observe.events import BucketReduced
from echelon.reduce.round_seen import BucketTimes
from echelon.train.clock import StepClock, exchanges_us
from echelon.train.thread_times import ThreadTimes


class Kept:
    """A recorder that keeps events in memory."""

    def __init__(self):
        self.steps = []

    def emit(self, event):
        self.steps.append(event)


class Watch:
    """A performance counter that the test advances; sleeping advances it too."""

    def __init__(self):
        self.now = 100.0

    def pass_s(self, seconds):
        self.now += seconds


class Pause(Delay):
    """A constant pause."""

    name = "pause"

    def __init__(self, seconds):
        object.__setattr__(self, "seconds", seconds)

    def sample(self, rng):
        return self.seconds


class Thread:
    """Times of a thread that the test sets."""

    def __init__(self):
        self.now = (1, 0.0, 0.0)

    def __call__(self):
        return self.now

    def pass_s(self, cpu_s, starved_s=0.0):
        self.now = (1, self.now[1] + cpu_s, self.now[2] + starved_s)


@pytest.fixture
def watch(monkeypatch):
    made = Watch()
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    monkeypatch.setattr(time, "time", lambda: made.now + 1e6)
    monkeypatch.setattr(time, "sleep", made.pass_s)
    return made


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def clock(watch, kept):
    made = StepClock(kept, rank=3)
    made.optimizers = 1
    return made


def batch(clock, watch, data_s=1.0, share=4, whole=10):
    clock.data_asked()
    watch.pass_s(data_s)
    clock.data_handed(share, whole)


def backward(clock, watch, compute_s=2.0, wait_s=3.0, sent_bytes=500):
    """A reducer's reports: two gradients, the arrival, the result."""
    watch.pass_s(compute_s / 2)
    clock.computing()
    watch.pass_s(compute_s / 2)
    clock.computing()
    clock.arrived()
    watch.pass_s(wait_s)
    clock.reduced(sent_bytes)


def apply(clock, watch, apply_s=0.5, optimizer=0):
    clock.applying(optimizer)
    watch.pass_s(apply_s)
    clock.applied(optimizer)


def test_the_parts_of_a_step_add_up_to_the_whole(clock, watch, kept):
    for _ in range(2):
        batch(clock, watch)
        backward(clock, watch)
        apply(clock, watch)
    clock.close()
    for number, step in enumerate(kept.steps):
        assert (step.step, step.rank, step.epoch) == (number, 3, 0)
        assert (step.data_s, step.compute_s, step.wait_s, step.apply_s) == (1.0, 2.0, 3.0, 0.5)
        assert (step.share, step.batch, step.sent_bytes, step.delay_s) == (4, 10, 500, 0.0)
        assert step.t - step.start == 6.5
        assert step.arrival == step.start + 3.0
    assert kept.steps[1].start == kept.steps[0].t
    assert clock.step == 2


def test_single_worker_has_no_waiting_time(clock, watch, kept):
    batch(clock, watch)
    watch.pass_s(2.0)
    apply(clock, watch)
    clock.data_asked()
    (step,) = kept.steps
    assert (step.data_s, step.compute_s, step.wait_s, step.apply_s) == (1.0, 2.0, 0.0, 0.5)
    assert step.arrival == step.start + 3.0


def test_evaluation_batches_are_not_counted_as_steps(clock, watch, kept):
    batch(clock, watch)
    backward(clock, watch)
    apply(clock, watch)
    for _ in range(3):
        batch(clock, watch, data_s=10.0, share=100, whole=100)
        watch.pass_s(20.0)
    batch(clock, watch)
    backward(clock, watch)
    apply(clock, watch)
    clock.close()
    assert clock.step == 2
    assert [step.share for step in kept.steps] == [4, 4]
    assert [step.data_s + step.compute_s for step in kept.steps] == [3.0, 3.0]
    assert kept.steps[1].start - kept.steps[0].t == 90.0


def test_an_accumulated_step_is_the_sum_of_its_micro_batches(clock, watch, kept):
    for _ in range(2):
        batch(clock, watch)
        watch.pass_s(2.0)
        clock.computing()
        clock.kept()
        watch.pass_s(0.25)  # what the script does besides
    batch(clock, watch)
    backward(clock, watch)
    apply(clock, watch)
    clock.close()
    (step,) = kept.steps
    assert (step.data_s, step.compute_s, step.wait_s) == (3.0, 6.0, 3.0)
    assert (step.share, step.batch) == (12, 30)


def test_a_second_backward_pass_computes_from_the_end_of_the_first_round(clock, watch, kept):
    batch(clock, watch)
    backward(clock, watch)
    backward(clock, watch)
    apply(clock, watch)
    clock.close()
    (step,) = kept.steps
    assert (step.compute_s, step.wait_s, step.sent_bytes) == (4.0, 6.0, 1000)


def test_steps_of_two_optimizers_are_counted_as_one_step(clock, watch, kept):
    clock.optimizers = 2
    for _ in range(3):
        batch(clock, watch)
        for optimizer in (11, 22):
            backward(clock, watch)
            apply(clock, watch, optimizer=optimizer)
    clock.close()
    assert clock.step == 3
    assert [step.apply_s for step in kept.steps] == [1.0, 1.0, 1.0]


def test_each_of_several_steps_on_one_batch_is_counted(clock, watch, kept):
    batch(clock, watch)
    for _ in range(3):
        backward(clock, watch)
        apply(clock, watch)
    clock.close()
    assert clock.step == 3
    assert [step.step for step in kept.steps] == [0, 1, 2]
    assert [(step.compute_s, step.wait_s, step.apply_s) for step in kept.steps] == [(2.0, 3.0, 0.5)] * 3
    assert [step.share for step in kept.steps] == [4, 0, 0], "the samples are counted once"


def test_each_step_without_a_loader_is_counted(clock, watch, kept):
    for _ in range(3):
        watch.pass_s(2.0)
        apply(clock, watch)
    clock.close()
    assert clock.step == 3
    assert [step.apply_s for step in kept.steps] == [0.5] * 3
    assert [step.compute_s for step in kept.steps[1:]] == [2.0, 2.0]


def test_injected_delay_is_added_to_the_compute_time_once_per_batch(watch, kept):
    clock = StepClock(kept, 0, delay=Pause(0.25))
    clock.optimizers = 1
    batch(clock, watch)
    backward(clock, watch)
    apply(clock, watch)
    clock.close()
    (step,) = kept.steps
    assert step.delay_s == 0.25
    assert step.compute_s == 2.25


def test_emulated_slowness_is_added_before_the_arrival(watch, kept):
    pace = Pace(
        0.25, cpu_clock=lambda: watch.now - slept[0], wall_clock=lambda: watch.now, sleep=lambda s: nap(s)
    )
    slept = [0.0]

    def nap(seconds):
        slept[0] += seconds
        watch.pass_s(seconds)

    clock = StepClock(kept, 0, pace=pace)
    clock.optimizers = 1
    batch(clock, watch)
    backward(clock, watch)
    apply(clock, watch)
    clock.close()
    (step,) = kept.steps
    assert step.compute_s == pytest.approx(8.0), "a quarter of the speed is four times the time"
    assert step.delay_s == pytest.approx(6.0)
    assert step.wait_s == 3.0


def test_noted_loss_is_recorded_unchanged(clock, watch, kept):
    for loss in (torch.tensor(0.5, requires_grad=True), 0.25, None):
        batch(clock, watch)
        backward(clock, watch)
        apply(clock, watch)
        if loss is not None:
            clock.note_loss(loss)
    clock.close()
    assert [step.loss for step in kept.steps] == [0.5, 0.25, None]


def test_closing_twice_or_without_a_step_records_nothing(clock, watch, kept):
    clock.close()
    batch(clock, watch)
    clock.close()
    backward(clock, watch)
    clock.close()
    assert kept.steps == []
    assert clock.step == 0


def report_bucket(clock, watch, index=0, **known):
    clock.bucket(
        BucketTimes(
            index=index, size_bytes=64, sent_bytes=32, filled_at=watch.now - 2.0, encode_s=0.25,
            adding_s=0.125, wait_s=0.5, **{"begun": 0.0, "sent": 0.0, "ended": 0.0, **known},
        )
    )  # fmt: skip


def test_bucket_is_recorded_in_unix_time_with_zero_for_unknown_times(clock, watch, kept):
    batch(clock, watch)
    clock.arrived()
    now = watch.now
    report_bucket(clock, watch, index=4, begun=now - 1.75, sent=now - 1.0, ended=now - 0.5, how="factors")
    report_bucket(clock, watch, index=5)
    known, unknown = kept.steps
    unix = now + 1e6
    assert (known.t, known.start, known.begun) == (unix, unix - 2.0, unix - 1.75)
    assert (known.sent, known.ended) == (unix - 1.0, unix - 0.5)
    assert (known.rank, known.index, known.size_bytes, known.sent_bytes, known.how) == (
        3,
        4,
        64,
        32,
        "factors",
    )
    assert (known.encode_s, known.adding_s, known.wait_s) == (0.25, 0.125, 0.5)
    assert (unknown.index, unknown.begun, unknown.sent, unknown.ended) == (5, 0.0, 0.0, 0.0)
    assert unknown.how == "dense"


@pytest.mark.parametrize("optimizers", [1, 2])
@pytest.mark.parametrize("steps_per_batch", [1, 3])
def test_bucket_has_the_number_of_the_step_that_is_recorded_after_it(
    clock, watch, kept, optimizers, steps_per_batch
):
    clock.optimizers = optimizers
    for _ in range(2):
        batch(clock, watch)
        for _ in range(steps_per_batch):
            for optimizer in range(optimizers):
                clock.computing()
                clock.arrived()
                report_bucket(clock, watch)
                clock.reduced(32)
                apply(clock, watch, optimizer=optimizer)
    clock.close()
    waiting = []
    for event in kept.steps:
        if isinstance(event, BucketReduced):
            waiting.append(event.step)
        else:
            assert waiting == [event.step] * optimizers
            assert event.sent_bytes == 32 * optimizers
            waiting = []
    assert clock.step == 2 * steps_per_batch
    assert waiting == []


def exchange(clock, watch, wait_s):
    with clock.exchange():
        watch.pass_s(wait_s)


def test_exchanges_within_a_step_are_waiting_and_not_computing(clock, watch, kept):
    batch(clock, watch, data_s=1.0)
    watch.pass_s(0.5)
    exchange(clock, watch, 3.0)  # in forward
    watch.pass_s(0.25)
    clock.computing()
    exchange(clock, watch, 0.125)  # in backward
    backward(clock, watch, compute_s=2.0, wait_s=1.5)
    apply(clock, watch, apply_s=0.5)
    clock.close()
    (step,) = kept.steps
    assert step.compute_s == 2.75
    assert step.wait_s == 3.0 + 0.125 + 1.5
    assert step.exchanges_us == [(1_500_000, 3_000_000), (250_000, 125_000)]
    assert step.data_s + step.compute_s + step.wait_s + step.apply_s == step.t - step.start
    assert step.deferred_s == 0.0


def test_an_exchange_after_the_optimizer_may_belong_to_the_step_that_is_over(clock, watch, kept):
    """As if the script combined its loss with the others' after the step."""
    for _ in range(2):
        batch(clock, watch, data_s=1.0)
        backward(clock, watch, compute_s=2.0, wait_s=0.5)
        apply(clock, watch, apply_s=0.5)
        with clock.exchange(begins_step=False):
            watch.pass_s(3.0)
    clock.close()
    assert [step.exchanges_us for step in kept.steps] == [[(4_000_000, 3_000_000)]] * 2
    assert [(step.compute_s, step.wait_s) for step in kept.steps] == [(2.0, 3.5)] * 2


def test_many_exchanges_are_merged_and_lose_no_time():
    at = 50.0
    met = []
    for number in range(40):
        at += 0.001 * (number % 7)
        met.append((at, at + 0.002))
        at += 0.002
    listed = exchanges_us(50.0, met)
    assert len(listed) == 5
    assert sum(own for own, _ in listed) == pytest.approx((at - 50.0 - 40 * 0.002) * 1e6, abs=1)
    assert sum(wait for _, wait in listed) == 80_000


def test_an_average_of_weights_is_an_exchange_after_the_optimizer(clock, watch, kept):
    batch(clock, watch, data_s=1.0)
    watch.pass_s(2.0)
    apply(clock, watch, apply_s=0.5)
    watch.pass_s(4.0)
    clock.waited(4.0)
    clock.averaged(700)
    clock.close()
    (step,) = kept.steps
    assert (step.compute_s, step.wait_s, step.apply_s, step.sent_bytes) == (2.0, 4.0, 0.5, 700)
    assert step.exchanges_us == [(3_500_000, 4_000_000)]
    assert step.deferred_s == 0.0


def test_waiting_for_the_round_before_is_neither_data_nor_compute(clock, watch, kept):
    clock.data_asked()
    watch.pass_s(2.0)
    clock.waited(2.0)  # a claim waits until the server has released this worker
    watch.pass_s(0.5)
    clock.data_handed(4, 10)
    watch.pass_s(1.0)
    clock.waited(1.0)  # the first layer uses its parameters
    backward(clock, watch, compute_s=2.0, wait_s=0.0)
    apply(clock, watch)
    clock.close()
    (step,) = kept.steps
    assert (step.data_s, step.compute_s, step.wait_s, step.deferred_s) == (0.5, 2.0, 3.0, 3.0)
    assert step.exchanges_us == []


def test_all_rounds_of_a_step_but_the_last_are_exchanges(clock, watch, kept):
    batch(clock, watch, data_s=1.0)
    for wait_s in (3.0, 0.5, 1.0):
        backward(clock, watch, compute_s=2.0, wait_s=wait_s)
    apply(clock, watch)
    clock.close()
    (step,) = kept.steps
    assert (step.compute_s, step.wait_s) == (6.0, 4.5)
    assert step.exchanges_us == [(3_000_000, 3_000_000), (2_000_000, 500_000)]
    assert step.arrival == step.start + 10.5


def test_a_closure_computes_and_waits_within_the_optimizer_but_counts_once(clock, watch, kept):
    batch(clock, watch, data_s=1.0)
    clock.applying(0)
    watch.pass_s(0.25)
    for _ in range(3):
        backward(clock, watch, compute_s=2.0, wait_s=1.0)
    clock.applied(0)
    clock.close()
    (step,) = kept.steps
    assert step.data_s + step.compute_s + step.wait_s + step.apply_s <= step.t - step.start
    assert step.wait_s == 3.0


def test_without_a_loader_an_exchange_begins_the_next_step_where_the_last_ended(clock, watch, kept):
    for _ in range(3):
        watch.pass_s(0.5)
        exchange(clock, watch, 0.25)
        backward(clock, watch)
        apply(clock, watch)
    clock.close()
    assert [len(step.exchanges_us) for step in kept.steps] == [1, 1, 1]
    assert kept.steps[1].exchanges_us == [(500_000, 250_000)]
    assert [one.t for one in kept.steps[:-1]] == [other.start for other in kept.steps[1:]]


def test_time_on_a_core_and_without_one_is_that_of_the_step_but_for_its_waits(watch, kept):
    thread = Thread()
    clock = StepClock(kept, 0, thread_times=ThreadTimes(thread))
    clock.optimizers = 1
    for factor in (1.0, 2.0):
        batch(clock, watch)
        thread.pass_s(0.5 * factor, 0.25)
        with clock.exchange():
            thread.pass_s(7.0, 7.0)
        thread.pass_s(1.0 * factor)
        clock.computing()
        clock.arrived()
        thread.pass_s(9.0, 9.0)
        clock.reduced(0)
        apply(clock, watch)
        thread.pass_s(0.25)
    clock.close()
    assert [(step.cpu_s, step.starved_s) for step in kept.steps] == [(1.75, 0.25), (3.25, 0.25)]


def test_time_of_an_average_of_weights_is_left_out_once_there_was_one(watch, kept):
    thread = Thread()
    clock = StepClock(kept, 0, thread_times=ThreadTimes(thread))
    clock.optimizers = 1
    for _ in range(3):
        batch(clock, watch)
        thread.pass_s(1.0)
        apply(clock, watch)
        thread.pass_s(5.0)
        clock.waited(1.0)
        clock.averaged(8)
        thread.pass_s(0.5)
    batch(clock, watch)
    thread.pass_s(1.0)
    apply(clock, watch)
    thread.pass_s(0.25)
    clock.close()
    assert [step.cpu_s for step in kept.steps] == [6.5, 1.5, 1.5, 1.25]


def test_a_worker_alone_counts_all_of_its_time(watch, kept):
    thread = Thread()
    clock = StepClock(kept, 0, thread_times=ThreadTimes(thread))
    clock.optimizers = 1
    batch(clock, watch)
    thread.pass_s(1.0)
    apply(clock, watch)
    thread.pass_s(0.5)
    clock.close()
    assert [step.cpu_s for step in kept.steps] == [1.5]
