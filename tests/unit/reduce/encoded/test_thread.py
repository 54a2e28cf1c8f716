"""Jobs enter each stage in the same order on all workers, whichever exchange is done first."""

from __future__ import annotations

import queue
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.comm.future import CallerFuture, Future
from echelon.errors import GradientError
from echelon.reduce.encoded.thread import CodecThread

PATIENCE_S = 90.0


class Exchange:
    """A future that is done when the test says so; with `tells` false, one that must be waited for."""

    def __init__(self, job, stage, *, tells=True, error=None):
        self.key = job, stage
        self._error = error
        self._over = Future()
        self.future = self._over if tells else CallerFuture(lambda _: self._over.wait(), lambda: False)

    def end(self):
        self._over.complete(error=self._error)


@pytest.fixture
def thread():
    made = CodecThread()
    yield made
    made.close()
    made.join(PATIENCE_S)


def steps(job, stages, begun, *, tells=True):
    for stage in range(stages):
        exchange = Exchange(job, stage, tells=tells)
        begun.put(exchange)
        yield exchange.future
        assert exchange.future.done()


@given(
    stages=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    seed=st.integers(0, 999),
    deaf=st.lists(st.integers(0, 4), max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_jobs_enter_every_stage_in_order_for_any_order_of_completion(stages, seed, deaf):
    """Some exchanges accept no callback: the thread waits for these."""
    choice = random.Random(seed)
    thread, begun = CodecThread(), queue.SimpleQueue()
    jobs = [
        thread.submit(steps(number, count, begun, tells=number not in deaf))
        for number, count in enumerate(stages)
    ]
    entered, in_flight = [], []
    while len(entered) < sum(stages) or in_flight:
        while not in_flight or not begun.empty():
            in_flight.append(begun.get(timeout=PATIENCE_S))
            entered.append(in_flight[-1].key)
        in_flight.pop(choice.randrange(len(in_flight))).end()
    for job in jobs:
        job.wait()
        assert job.done()
    thread.close()
    thread.join(PATIENCE_S)
    for stage in range(max(stages)):
        order = [job for job, at in entered if at == stage]
        assert order == sorted(order)
        assert len(order) == sum(count > stage for count in stages)


def test_a_job_does_not_pass_one_whose_exchange_is_not_done(thread):
    """Both are in stage 0; the second is done, and must not enter stage 1 before the first."""
    begun = queue.SimpleQueue()
    first, second = (thread.submit(steps(number, 2, begun)) for number in range(2))
    exchanges = [begun.get(timeout=PATIENCE_S) for _ in range(2)]
    assert [exchange.key for exchange in exchanges] == [(0, 0), (1, 0)]
    exchanges[1].end()
    exchanges[0].end()
    later = [begun.get(timeout=PATIENCE_S) for _ in range(2)]
    assert [exchange.key for exchange in later] == [(0, 1), (1, 1)]
    assert not first.done()
    assert not second.done()
    for exchange in later:
        exchange.end()
    first.wait()
    second.wait()


class Bell:
    """Wakes whoever sleeps only when it is rung; like a bell in shared memory, but without a limit."""

    def __init__(self):
        self._rung = threading.Event()
        self.asleep = threading.Event()

    def sleep(self, seconds, asleep):
        self._rung.clear()
        if asleep():
            self.asleep.set()
            assert self._rung.wait(PATIENCE_S)

    def ring_own(self):
        self._rung.set()


def test_a_thread_that_sleeps_until_a_worker_rings_takes_new_jobs_and_goes_on_when_it_rings(thread):
    bell, over, begun = Bell(), threading.Event(), queue.SimpleQueue()

    def silent():
        yield CallerFuture(lambda _: None, over.is_set, alarm=bell)

    first = thread.submit(silent())
    assert bell.asleep.wait(PATIENCE_S)
    second = thread.submit(steps(1, 1, begun))
    begun.get(timeout=PATIENCE_S).end()
    over.set()
    bell.ring_own()
    first.wait()
    second.wait()


class Lost(Exception):
    """An error of an exchange."""


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("error", [Lost("rank 2"), GradientError("rank 2")])
def test_an_error_is_raised_to_waiting_threads_and_other_jobs_go_on_only_if_all_workers_have_it(
    thread, tells, error
):
    exchange = Exchange(0, 0, tells=tells, error=error)

    def broken():
        yield exchange.future
        exchange.future.wait()

    begun = queue.SimpleQueue()
    bad, good = thread.submit(broken()), thread.submit(steps(1, 1, begun))
    exchange.end()
    for _ in range(2):  # however often it is asked
        with pytest.raises(type(error), match="rank 2"):
            bad.wait()
    if isinstance(error, GradientError) and tells:
        begun.get(timeout=PATIENCE_S).end()
        good.wait()
        return
    with pytest.raises(type(error), match="rank 2"):  # it would be taken for the one that failed
        good.wait()
    with pytest.raises(type(error), match="rank 2"):
        thread.submit(steps(2, 1, begun)).wait()


def test_a_job_that_fails_before_its_first_exchange_is_over(thread):
    def at_once():
        raise Lost("encoding")
        yield

    with pytest.raises(Lost, match="encoding"):
        thread.submit(at_once()).wait()


def test_its_thread_ends_with_the_last_job_after_it_was_closed():
    thread, begun = CodecThread(), queue.SimpleQueue()
    job = thread.submit(steps(0, 1, begun))
    exchange = begun.get(timeout=PATIENCE_S)
    thread.close()
    exchange.end()
    job.wait()
    thread.join(PATIENCE_S)
    assert not any(thread.name == "echelon-codec" for thread in threading.enumerate())


def test_without_jobs_there_is_no_thread():
    thread = CodecThread()
    thread.close()
    thread.join(PATIENCE_S)
    assert not any(thread.name == "echelon-codec" for thread in threading.enumerate())
