"""Operations are carried out in the order of their calls."""

from __future__ import annotations

import threading

import pytest
from torch import Tensor

from echelon.backend.order import Apart, CallOrder, Job, Steps
from echelon.comm.future import Future
from echelon.errors import PeerLost, RoundTimeout

LIMIT_S = 60.0


@pytest.fixture
def order() -> CallOrder:
    return CallOrder("order-under-test")


def steps(log: list[str], name: str, future: Future[None] | None = None) -> Steps:
    log.append(f"{name} begins")
    yield future or Future.completed(None)
    log.append(f"{name} ends")
    return []


def test_call_that_is_waited_for_runs_in_the_waiting_thread(order: CallOrder) -> None:
    found: list[int] = []

    def mine() -> Steps:
        found.append(threading.get_ident())
        yield Future.completed(None)
        return []

    job = Job(mine(), LIMIT_S)
    order.submit(job, background=False)
    assert order.wait(job)
    assert found == [threading.get_ident()]


def test_brief_operations_overlap_and_others_do_not(order: CallOrder) -> None:
    log: list[str] = []
    jobs = [
        Job(steps(log, "a"), LIMIT_S, brief=True),
        Job(steps(log, "b"), LIMIT_S),
        Job(steps(log, "c"), LIMIT_S),
    ]
    for job in jobs:
        order.submit(job, background=False)
    order.wait(jobs[-1])
    assert log == ["a begins", "b begins", "a ends", "b ends", "c begins", "c ends"]


def test_operation_in_the_background_ends_without_a_wait(order: CallOrder) -> None:
    ended = threading.Event()
    job = Job(steps([], "a"), LIMIT_S)
    job.call_when_done(ended.set)
    order.submit(job, background=True)
    assert ended.wait(LIMIT_S)
    order.close(PeerLost("over"))


def test_operations_after_a_failed_one_fail_with_its_error(order: CallOrder) -> None:
    def failing() -> Steps:
        raise PeerLost("rank 1 is gone", ranks=(1,))
        yield Future.completed(None)

    log: list[str] = []
    jobs = [Job(failing(), LIMIT_S), Job(steps(log, "b"), LIMIT_S)]
    for job in jobs:
        order.submit(job, background=False)
    order.wait(jobs[1])
    assert [str(job.error) for job in jobs] == ["rank 1 is gone"] * 2
    assert log == []


def test_deadline_ends_an_operation(order: CallOrder) -> None:
    job = Job(steps([], "a", Future()), 0.01)
    order.submit(job, background=False)
    order.wait(job)
    assert isinstance(job.error, RoundTimeout)


def test_wait_with_a_timeout_leaves_the_operation_in_flight(order: CallOrder) -> None:
    future: Future[None] = Future()
    job = Job(steps([], "a", future), LIMIT_S)
    order.submit(job, background=True)
    assert not order.wait(job, 0.01)
    future.complete(None)
    assert order.wait(job, LIMIT_S)
    order.close(PeerLost("over"))


def test_message_is_over_as_soon_as_somebody_looks() -> None:
    future: Future[None] = Future()
    job, apart = Job(steps([], "a", future), LIMIT_S), Apart("apart-under-test")
    job.begin()
    assert not apart.look(job)
    assert not apart.wait(job, 0.01)
    future.complete(None)
    assert apart.look(job)


def test_result_is_that_of_the_steps(order: CallOrder) -> None:
    tensor = Tensor()

    def mine() -> Steps:
        yield Future.completed(None)
        return [tensor]

    job = Job(mine(), LIMIT_S)
    order.submit(job, background=False)
    order.wait(job)
    assert job.result[0] is tensor
