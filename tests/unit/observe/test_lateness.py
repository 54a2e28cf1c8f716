"""Who is late in every round, now and then, or once."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.arrival import ObservedRound
from echelon.observe.events import StepEnded
from echelon.observe.lateness import CircleTally, Lateness, LatenessTally


def _step(rank: int, step: int, start: float, arrival: float, result: float) -> StepEnded:
    return StepEnded(
        t=result, rank=rank, step=step, epoch=0, start=start, data_s=0.0, compute_s=arrival - start,
        arrival=arrival, wait_s=result - arrival, apply_s=0.0, share=1, batch=2, sent_bytes=1,
    )  # fmt: skip


def _judged(late_s: list[list[float]]) -> Lateness:
    """Rounds in which each worker is late by so much beyond a tenth of a second."""
    tally = LatenessTally()
    at = 0.0
    for number, late in enumerate(late_s):
        arrivals = [at + 0.1 + seconds for seconds in late]
        result = max(arrivals) + 0.01
        steps = {rank: _step(rank, number, at, came, result) for rank, came in enumerate(arrivals)}
        tally.add(ObservedRound(number, steps))
        at = result
    return tally.figures(hosts=1)


def test_a_worker_that_is_late_in_every_round_is_late_steadily():
    found = _judged([[0.0, 0.05 + 0.01 * (n % 3)] for n in range(60)])
    assert found.of(1).steady == 1.0
    assert found.of(1).times_last == found.rounds == 60
    assert found.standstills == ()


@pytest.mark.parametrize("chance", [0.05, 0.1, 0.3])
def test_a_worker_that_is_late_now_and_then_is_not_late_steadily(chance):
    draw = random.Random(4)
    late = [
        [draw.random() * 1e-3, 0.2 if draw.random() < chance else draw.random() * 1e-3] for _ in range(300)
    ]
    found = _judged(late)
    assert found.of(1).steady == pytest.approx(chance, abs=0.05)
    assert found.standstills == ()


@pytest.mark.parametrize("times", [1, 2, 3])
def test_few_rounds_that_stand_far_out_are_standstills(times):
    late = [[0.001 * (n % 3), 0.002] for n in range(60)]
    for number in range(times):
        late[10 + 7 * number][number % 2] = 4.0 + number
    found = _judged(late)
    told = [
        (standstill.step, standstill.rank, round(standstill.seconds, 2)) for standstill in found.standstills
    ]
    assert sorted(told) == [(10 + 7 * n, n % 2, 4.0 + n) for n in range(times)]


def test_standstills_do_not_make_a_slow_worker_one_that_is_late_now_and_then():
    late = [[0.0, 0.05] for _ in range(100)]
    late[30][1] = 9.0
    found = _judged(late)
    assert [standstill.step for standstill in found.standstills] == [30]
    assert found.of(1).steady == 1.0


@pytest.mark.parametrize(("rounds", "stood_still"), [(3, 1), (4, 1), (20, 3), (100, 4)])
def test_many_of_a_few_rounds_or_more_than_three_are_no_standstills(rounds, stood_still):
    late = [[0.0, 4.0 if n < stood_still else 0.001] for n in range(rounds)]
    assert _judged(late).standstills == ()


def test_lateness_after_a_late_result_is_kept_apart():
    tally = LatenessTally()
    at = {0: 0.0, 1: 0.0}
    for number in range(20):
        arrivals = {rank: since + 0.1 for rank, since in at.items()}
        result = max(arrivals.values()) + 0.01
        at = {0: result, 1: result + 0.05}
        steps = {rank: _step(rank, number, arrivals[rank] - 0.1, arrivals[rank], at[rank]) for rank in at}
        tally.add(ObservedRound(number, steps))
    one = tally.figures(hosts=1).of(1)
    assert one.held_up_s == pytest.approx(19 * 0.05)
    assert one.late_result_s == pytest.approx(one.held_up_s)
    assert tally.figures(hosts=1, all_meet=False).of(1).late_result_s == 0.0


@settings(max_examples=40)
@given(st.lists(st.lists(st.floats(0, 2, width=16), min_size=3, max_size=3), min_size=1, max_size=40))
def test_the_workers_sums_are_those_of_the_run(late):
    found = _judged(late)
    workers = [found.of(rank) for rank in range(3)]
    assert sum(worker.held_up_s for worker in workers) == pytest.approx(found.spread_s)
    assert sum(worker.times_last for worker in workers) == found.rounds == len(late)
    assert all(0 <= worker.steady <= 1 for worker in workers)
    assert sum(standstill.seconds for standstill in found.standstills) <= found.spread_s + 1e-6


def test_taking_more_rounds_into_account_changes_nothing_for_later():
    tally = LatenessTally()
    rounds = [
        ObservedRound(n, {0: _step(0, n, n, n + 0.1, n + 0.4), 1: _step(1, n, n, n + 0.3, n + 0.4)})
        for n in range(6)
    ]
    tally.add(rounds[0])
    before = tally.figures(hosts=1)
    assert tally.with_more(rounds[1:]).figures(hosts=1).rounds == 6
    assert tally.figures(hosts=1) == before


# Groups that act as one worker ------------------------------------------------------------------------


def _grouped(step: int, late: dict[int, float], *, averages: bool) -> list[StepEnded]:
    """Two pairs that reduce gradients in every step; then their first ranks may average weights."""
    reached = {}
    steps = []
    for pair in ((0, 1), (2, 3)):
        reached[pair] = max(0.1 + late.get(rank, 0.0) for rank in pair) + 0.01
        for rank in pair:
            arrival = 0.1 + late.get(rank, 0.0)
            steps.append(_step(rank, step, 0.0, arrival, reached[pair]))
    if averages:
        over = max(reached.values()) + 0.02
        for place, one in enumerate(steps):
            if one.rank in (0, 2):
                began = reached[0, 1] if one.rank == 0 else reached[2, 3]
                waited_us = round((over - began) * 1e6)
                steps[place] = msgspec.structs.replace(
                    one,
                    t=over,
                    wait_s=one.wait_s + waited_us / 1e6,
                    exchanges_us=[(round(began * 1e6), waited_us)],
                )
    return steps


@pytest.mark.parametrize("late", [0, 1, 2, 3])
@pytest.mark.parametrize("averages", [False, True])
def test_a_late_member_is_charged_and_not_the_first_rank_of_its_group(late, averages):
    circles, tally = CircleTally([(0, 1), (2, 3)]), LatenessTally()
    for number in range(30):
        for event in _grouped(number, {late: 0.3}, averages=averages):
            inside, between = circles.add(event)
            if inside is not None:
                tally.add(inside)
            if between is not None:
                tally.add(between, between=True)
    found = tally.figures(hosts=1, all_meet=False)
    assert found.met == 2
    assert max(range(4), key=lambda rank: found.of(rank).held_up_s) == late
    assert found.of(late).held_up_s == pytest.approx(30 * 0.3, rel=0.01)
    assert found.of(late).times_last == found.of(late).rounds == 30


def test_a_group_whose_members_are_all_late_is_charged_by_its_first_rank():
    circles, tally = CircleTally([(0, 1), (2, 3)]), LatenessTally()
    for number in range(30):
        for event in _grouped(number, {2: 0.3, 3: 0.3}, averages=True):
            inside, between = circles.add(event)
            if inside is not None:
                tally.add(inside)
            if between is not None:
                tally.add(between, between=True)
    found = tally.figures(hosts=1, all_meet=False)
    assert max(range(4), key=lambda rank: found.of(rank).held_up_s) == 2
    assert found.spread_s == pytest.approx(30 * 0.3, rel=0.01)
