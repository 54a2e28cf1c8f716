"""A future is completed once, tells everyone, and says so where only a waiting caller completes it."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from echelon.comm import future as module
from echelon.comm.future import CallerFuture, Future, Timing
from echelon.errors import PeerLost, RoundTimeout

PATIENCE_S = 10.0


class Told:
    """A callback that counts."""

    def __init__(self):
        self.times = 0

    def __call__(self):
        self.times += 1


class Waiting:
    """What a thread that waits is told; it remembers what it was asked for."""

    def __init__(self, limit_s=None, on_progress=lambda: None):
        self.progressed = 0
        self.reports = []
        self.blocked = 1000  # reports, after which there is nothing more to report
        self.ended = Told()
        self._limit_s = limit_s
        self._on_progress = on_progress

    def progress(self):
        self.progressed += 1
        self._on_progress()

    def limit_s(self):
        return self._limit_s

    def overdue(self, timeout_s):
        return RoundTimeout(f"rank 3 did not arrive within {timeout_s}", ranks=(3,))

    def stalled(self, waited_s, *, endless):
        self.reports.append((waited_s, endless))
        return self.ended if len(self.reports) <= self.blocked else None


@pytest.fixture
def impatient(monkeypatch):
    """A wait lasts long after a moment."""
    monkeypatch.setattr(module, "LONG_S", 0.02)


def test_a_completed_future_gives_its_result_at_once():
    tensor = torch.ones(3)
    future = Future.completed(tensor)
    assert future.done()
    assert future.wait() is tensor
    assert future.wait(0.0) is tensor
    assert future.error is None


def test_the_first_completion_counts():
    future = Future()
    future.complete(1)
    future.complete(2)
    future.complete(error=PeerLost("too late"))
    assert future.wait() == 1
    failed = Future()
    failed.complete(error=PeerLost("rank 1 is gone", ranks=(1,)))
    failed.complete(3)
    for waiting in (failed, failed.then(torch.neg), Future.all([Future.completed(1), failed], 0)):
        for _ in range(2):
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                waiting.wait()
        assert waiting.done()


def test_all_threads_that_wait_get_the_result():
    future, found = Future(), []
    threads = [threading.Thread(target=lambda: found.append(future.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not future.done()
    future.complete("result")
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found == ["result"] * 4


def test_a_thread_makes_progress_before_it_blocks_and_may_complete_the_future_by_it():
    waiting = Waiting(on_progress=lambda: future.complete("mine"))
    future = Future(waiting)
    assert future.wait() == future.wait() == "mine"
    assert waiting.progressed == 1


@pytest.mark.parametrize(("limit_s", "timeout_s", "reported"), [(0.01, None, None), (60, 0.01, 0.01)])
def test_a_wait_is_bounded_by_the_deadline_and_the_timeout_and_names_the_awaited(
    limit_s, timeout_s, reported
):
    waiting = Waiting(limit_s)
    future = Future(waiting)
    for pending in (future, future.then(abs), Future.all([future], 0)):
        with pytest.raises(RoundTimeout, match="rank 3 did not arrive") as caught:
            pending.wait(timeout_s)
        assert caught.value.ranks == (3,)
        assert caught.value.message.endswith(f" {reported}") or pending is not future
        assert not pending.done()
    assert future.then(abs).overdue(1.0).ranks == (3,)
    future.complete(-4)
    assert future.then(abs).wait(timeout_s) == 4


def test_a_completed_future_no_longer_holds_its_operation():
    waiting = Waiting()
    held, future = weakref.ref(waiting), Future(waiting)
    del waiting
    future.complete()
    gc.collect()
    assert held() is None


def test_a_callback_that_fails_does_not_keep_others_from_being_called(caplog):
    def fail():
        raise ValueError("a defect of the callback")

    future, told = Future(), Told()
    future.add_done_callback(fail)
    future.add_done_callback(told)
    future.complete()
    future.complete()
    assert told.times == 1
    assert "a defect of the callback" in caplog.text


def test_a_callback_is_called_exactly_once_whichever_thread_is_first():
    for _ in range(200):
        future, tolds = Future(), [Told() for _ in range(4)]
        threads = [threading.Thread(target=future.complete) for _ in range(2)]
        for thread in threads:
            thread.start()
        for told in tolds:
            assert future.add_done_callback(told)
        for thread in threads:
            thread.join()
        assert [told.times for told in tolds] == [1] * 4


def test_derived_futures_pass_callbacks_on():
    futures, told = [Future(), Future()], [Told(), Told()]
    assert futures[0].then(torch.neg).add_done_callback(told[0])
    both = Future.all(futures, "both")
    assert both.add_done_callback(told[1])
    futures[0].complete(torch.ones(1))
    assert [one.times for one in told] == [1, 0]
    assert not both.done()
    futures[1].complete()
    assert [one.times for one in told] == [1, 1]
    assert both.wait() == "both"


def test_future_that_needs_the_callers_work_reports_it_until_it_is_done():
    over, told = [], Told()
    future = CallerFuture(lambda _: torch.ones(1), lambda: bool(over))
    for pending in (future, future.then(torch.neg), Future.all([Future(), future], 0)):
        assert not pending.add_done_callback(told)
    assert told.times == 0
    over.append(1)
    assert future.add_done_callback(told)
    assert told.times == 1


def test_the_callers_work_is_done_once_however_often_it_is_waited_for():
    worked = []

    def work(timeout_s):
        worked.append(timeout_s)
        return torch.ones(1)

    future = CallerFuture(work, lambda: bool(worked), lambda: Timing(begun=2.0))
    assert not future.done()
    assert future.wait(5.0) is future.wait()
    assert worked == [5.0]
    assert future.timing.begun == future.then(torch.neg).timing.begun == 2.0


def test_callers_work_that_fails_raises_each_time():
    def work(timeout_s):
        raise PeerLost("rank 1 is gone", ranks=(1,))

    future = CallerFuture(work, lambda: True)
    for waiting in (future, future.then(torch.neg)):
        for _ in range(2):
            with pytest.raises(PeerLost, match="rank 1 is gone"):
                waiting.wait()


def test_a_last_step_runs_when_someone_waits_and_only_once():
    steps = []

    def halve(tensor):
        steps.append(1)
        return tensor / 2

    later = Future.completed(torch.full((2,), 8.0)).then(halve)
    assert later.done()
    assert steps == []
    assert later.wait().tolist() == later.wait().tolist() == [4.0, 4.0]
    assert steps == [1]


def test_last_steps_run_in_the_order_in_which_they_were_added():
    future = Future.completed(torch.tensor(3.0)).then(lambda t: t + 1).then(lambda t: t * 10)
    assert future.wait().item() == 40.0


def test_the_timing_of_several_spans_them_all():
    parts = [Future(timing=Timing(2.0, 3.0, 4.0, 0.5)), Future(timing=Timing(1.0, 5.0, 3.0, 0.25))]
    assert Future.all(parts, None).timing == Timing(1.0, 5.0, 4.0, 0.75)


# Waits that last long ----------------------------------------------------------------------------


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("timeout_s", "endless"), [(None, True), (PATIENCE_S, False)])
def test_a_wait_that_lasts_long_is_reported_until_it_ends(timeout_s, endless):
    waiting = Waiting()
    future = Future(waiting)

    def complete():
        for _ in range(int(PATIENCE_S / 0.01)):
            if len(waiting.reports) > 2:
                break
            time.sleep(0.01)
        future.complete("result")

    thread = threading.Thread(target=complete)
    thread.start()
    assert future.wait(timeout_s) == "result"
    thread.join()
    assert waiting.ended.times == 1
    assert {flag for _, flag in waiting.reports} == {endless}
    waits = [waited_s for waited_s, _ in waiting.reports]
    assert len(waits) > 2
    assert waits == sorted(waits)
    assert waits[0] >= 0.02


@pytest.mark.usefixtures("impatient")
def test_a_report_ends_when_nothing_blocks_the_wait_any_more():
    """As between two exchanges of a codec."""
    waiting = Waiting(limit_s=0.5)
    waiting.blocked = 2
    with pytest.raises(RoundTimeout):
        Future(waiting).wait()
    assert waiting.ended.times == 1
    assert len(waiting.reports) > 3


@pytest.mark.usefixtures("impatient")
def test_a_report_ends_with_a_wait_that_times_out():
    waiting = Waiting()
    with pytest.raises(RoundTimeout):
        Future(waiting).wait(0.1)
    assert waiting.ended.times == 1


def test_a_short_wait_is_not_reported():
    waiting = Waiting()
    future = Future(waiting)
    threading.Timer(0.01, future.complete, ("result",)).start()
    assert future.wait() == "result"
    assert waiting.reports == []
