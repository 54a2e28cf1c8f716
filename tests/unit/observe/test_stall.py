"""When steps stop, and who is missing: invented events, and a clock that the test moves."""

from __future__ import annotations

import pytest

from echelon.observe.events import StepEnded, WorkersAwaited
from echelon.observe.stall import Stall, StallWatch


def _step(rank: int, step: int, t: float, length_s: float = 0.1) -> StepEnded:
    return StepEnded(
        t=t,
        rank=rank,
        step=step,
        epoch=0,
        start=t - length_s,
        data_s=0.0,
        compute_s=length_s / 2,
        arrival=t - length_s / 2,
        wait_s=0.0,
        apply_s=0.0,
        share=8,
        batch=16,
        sent_bytes=0,
    )


def _awaited(rank: int, *awaited: int, t: float, since: float, doing: str = "") -> WorkersAwaited:
    return WorkersAwaited(t=t, rank=rank, step=9, since=since, awaited=list(awaited), doing=doing)


def _stepping(steps: int = 10, length_s: float = 0.1, workers: int = 2) -> tuple[StallWatch, float]:
    """A watch after some steps of all workers, and the time of the last."""
    watch, now = StallWatch(), 1000.0
    for step in range(steps):
        now += length_s
        for rank in range(workers):
            watch.take(_step(rank, step, now, length_s), now)
    return watch, now


def test_nothing_is_said_while_steps_go_on():
    watch, now = _stepping()
    assert watch.look(now) is None
    assert watch.look(now + 2.9) is None


def test_silence_is_told_but_nobody_is_blamed_for_it():
    watch, now = _stepping()
    assert str(watch.look(now + 12.4)) == "no step for 12 s"


def test_long_steps_are_no_silence():
    watch, now = _stepping(length_s=20.0)
    assert watch.look(now + 60) is None
    assert str(watch.look(now + 101)) == "no step for 1 min 41 s"


def test_worker_that_others_wait_for_is_missing():
    watch, now = _stepping(workers=4)
    for rank in (0, 2, 3):
        watch.take(_awaited(rank, 1, t=now + 11, since=now), now + 11)
    assert str(watch.look(now + 12)) == "no step for 12 s: rank 1 is missing"


def test_several_missing_workers_are_named_with_what_they_do():
    watch, now = _stepping(workers=4)
    doing = "rank 1 is in save() (train.py:41)"
    watch.take(_awaited(0, 1, 3, t=now + 4, since=now, doing=doing), now + 4)
    watch.take(_awaited(2, 1, 3, t=now + 4, since=now, doing=doing), now + 4)
    assert str(watch.look(now + 5)) == f"no step for 5 s: ranks 1 and 3 are missing; {doing}"


def test_workers_that_wait_for_each_other_are_told_by_what_they_do():
    watch, now = _stepping()
    watch.take(_awaited(0, 1, t=now + 4, since=now, doing="rank 1 is in a backward pass"), now + 4)
    watch.take(_awaited(1, 0, t=now + 4, since=now, doing="rank 0 is in save()"), now + 4)
    assert str(watch.look(now + 5)) == "no step for 5 s: rank 1 is in a backward pass; rank 0 is in save()"


def test_waiting_for_a_slower_worker_is_no_stall():
    watch, now = _stepping(length_s=10.0)
    watch.take(_awaited(0, 1, t=now + 8, since=now + 4), now + 8)
    assert watch.look(now + 9) is None


def test_wait_that_is_not_renewed_is_over():
    watch, now = _stepping()
    watch.take(_awaited(0, 1, t=now + 3, since=now), now + 3)
    assert watch.look(now + 8).missing == (1,)
    assert watch.look(now + 10) == Stall(seconds=pytest.approx(10))


def test_stall_is_over_when_steps_go_on():
    watch, now = _stepping()
    watch.take(_awaited(0, 1, t=now + 9, since=now), now + 9)
    for rank in (0, 1):
        watch.take(_step(rank, 10, now + 10), now + 10)
    assert watch.look(now + 10) is None
    assert watch.look(now + 14) == Stall(seconds=pytest.approx(4)), "the wait is over, too"


def test_step_that_was_written_late_does_not_end_the_wait_of_another_worker():
    watch, now = _stepping(workers=3)
    watch.take(_awaited(0, 1, t=now + 4, since=now), now + 4)
    watch.take(_step(2, 10, now + 0.05), now + 4.1)
    assert watch.look(now + 7.5).missing == (1,)


def test_silence_counts_from_the_end_of_a_step_that_was_written_late():
    watch, now = _stepping()
    watch.take(_step(0, 10, now + 0.1), now + 5)
    assert watch.look(now + 6).seconds == pytest.approx(5.9)


@pytest.mark.parametrize("set_s", [-3600.0, 3600.0])
def test_clock_that_is_set_makes_no_stall(set_s):
    watch, now = _stepping()
    for step in range(10, 100):
        now += 0.5
        watch.take(_step(0, step, now + set_s, 0.5), now)
        assert watch.look(now) is None
        assert watch.look(now + 2) is None


def test_before_the_first_step_workers_that_others_wait_for_are_named():
    watch = StallWatch()
    assert watch.look(1000.0) is None
    watch.take(_awaited(0, 1, t=500.0, since=496.0), 1000.0)
    assert str(watch.look(1001.0)) == "no step for 5 s: rank 1 is missing"


def test_worker_that_is_behind_is_missing_without_anyone_saying_so():
    watch, now = _stepping(length_s=5.0)
    watch.take(_step(0, 10, now + 5, 5.0), now + 5)
    assert watch.look(now + 40).missing == (1,)


def test_events_that_are_written_at_different_times_blame_nobody():
    watch, now = _stepping()
    watch.take(_step(0, 10, now + 0.1), now + 0.1)
    watch.take(_step(0, 11, now + 0.2), now + 0.2)
    assert watch.look(now + 9).missing == ()


def test_worker_that_stops_while_others_go_on_is_silent():
    watch, now = _stepping(workers=3)
    for step in range(10, 100):
        now += 0.1
        for rank in (0, 2):
            watch.take(_step(rank, step, now), now)
    assert watch.look(now) is None
    assert [watch.silence_s(rank, now) for rank in (0, 2, 7)] == [0.0, 0.0, 0.0]
    assert watch.silence_s(1, now + 1) == pytest.approx(10)
