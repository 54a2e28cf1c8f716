from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.arrival import (
    ObservedRound,
    RoundTally,
    basis,
    charge,
    clock_offsets,
    contradicts,
    judge,
    same_clock,
)
from echelon.observe.events import StepEnded

_ARRIVALS = st.dictionaries(st.integers(0, 30), st.floats(0, 1e4, width=32), min_size=1, max_size=12)


def _step(rank: int, arrival: float, wait_s: float = 1.0, step: int = 0, ahead_s: float = 0.0) -> StepEnded:
    return StepEnded(
        t=arrival + wait_s + ahead_s,
        rank=rank,
        step=step,
        epoch=0,
        start=arrival - 1 + ahead_s,
        data_s=0.0,
        compute_s=1.0,
        arrival=arrival + ahead_s,
        wait_s=wait_s,
        apply_s=0.0,
        share=1,
        batch=1,
        sent_bytes=0,
    )


def _round(
    arrivals: dict[int, float], result: float, ahead: dict[int, float] | None = None
) -> ObservedRound:
    ahead = ahead or {}
    return ObservedRound(
        0,
        {rank: _step(rank, at, result - at, ahead_s=ahead.get(rank, 0.0)) for rank, at in arrivals.items()},
    )


def test_the_time_between_two_arrivals_is_charged_to_the_missing_workers():
    assert charge({0: 0.0, 1: 3.0, 2: 7.0}) == {0: 0.0, 1: 1.5, 2: 5.5}


def test_a_lone_straggler_is_charged_the_whole_spread():
    assert charge({0: 1.0, 1: 1.0, 2: 1.0, 3: 5.0}) == {0: 0.0, 1: 0.0, 2: 0.0, 3: 4.0}


@settings(max_examples=150)
@given(_ARRIVALS)
def test_charges_sum_to_the_spread_and_grow_with_lateness(arrivals):
    charges = charge(arrivals)
    spread = max(arrivals.values()) - min(arrivals.values())
    assert sum(charges.values()) == pytest.approx(spread, abs=1e-6)
    assert set(charges) == set(arrivals)
    ordered = sorted(arrivals, key=lambda rank: (arrivals[rank], rank))
    assert charges[ordered[0]] == 0
    assert all(charges[a] <= charges[b] for a, b in pairwise(ordered))


@settings(max_examples=60)
@given(_ARRIVALS, st.integers(0, 10), st.integers(1, 1000))
def test_arriving_later_never_lowers_the_charge(arrivals, index, later):
    rank = sorted(arrivals)[index % len(arrivals)]
    before = charge(arrivals)[rank]
    after = charge(arrivals | {rank: arrivals[rank] + later})[rank]
    assert after >= before - 1e-6


@settings(max_examples=60)
@given(st.dictionaries(st.integers(0, 9), st.floats(0, 100), min_size=2, max_size=8))
def test_judging_by_waiting_equals_judging_by_arrival_if_results_reach_all_at_once(arrivals):
    round_ = _round(arrivals, result=max(arrivals.values()) + 2)
    by_arrival, by_wait = judge(round_), judge(round_, "wait")
    assert by_wait.spread_s == pytest.approx(by_arrival.spread_s, abs=1e-6)
    assert by_wait.charged_s == pytest.approx(by_arrival.charged_s, abs=1e-6)
    assert by_wait.waited_s == pytest.approx(by_arrival.waited_s, abs=1e-6)


def test_a_judgement_names_the_last_and_how_long_each_waited_for_it():
    judged = judge(_round({0: 0.0, 1: 3.0, 2: 7.0}, result=8.0))
    assert judged.last == 2
    assert judged.spread_s == 7.0
    assert judged.alone_s == 4.0
    assert judged.waited_s == {0: 7.0, 1: 4.0, 2: 0.0}


def test_time_waited_for_late_workers_is_at_most_the_whole_waiting_time():
    steps = {0: _step(0, 0.0, wait_s=0.25), 1: _step(1, 1.0, wait_s=0.1)}
    assert judge(ObservedRound(0, steps)).waited_s == {0: 0.25, 1: 0.0}


def test_a_result_before_the_last_arrival_is_a_contradiction():
    assert not contradicts(_round({0: 0.0, 1: 1.0}, result=1.5))
    assert contradicts(_round({0: 0.0, 1: 1.0}, result=1.5, ahead={1: 2.0}))


def test_clocks_are_distrusted_only_if_most_rounds_contradict_and_there_are_several_machines():
    assert basis(60, 100, hosts=4) == "wait"
    assert basis(60, 100, hosts=0) == "wait"
    assert basis(50, 100, hosts=4) == "arrival"
    assert basis(100, 100, hosts=1) == "arrival"


def test_same_clock_corrects_the_times_of_steps():
    rounds = [_round({0: 0.0, 1: 3.0}, result=4.0, ahead={1: 100.0}) for _ in range(3)]
    offsets = clock_offsets(rounds)
    assert offsets == pytest.approx({0: 0.0, 1: 100.0})
    put_right = same_clock(rounds[0].workers[1], offsets)
    assert (put_right.start, put_right.arrival, put_right.t) == pytest.approx((2.0, 3.0, 4.0))
    assert same_clock(rounds[0].workers[0], offsets) is rounds[0].workers[0]


def test_a_round_is_complete_when_its_last_worker_reports():
    rounds = RoundTally()
    assert rounds.add(_step(0, 1.0, step=5), 2) is None
    assert rounds.add(_step(0, 2.0, step=6), 2) is None
    complete = rounds.add(_step(1, 1.5, step=5), 2)
    assert complete is not None
    assert (complete.step, sorted(complete.workers)) == (5, [0, 1])
    assert [round_.step for round_ in rounds.incomplete()] == [6]


def test_incomplete_rounds_beyond_the_limit_are_dropped():
    rounds = RoundTally(limit=3)
    for step in range(10):
        rounds.add(_step(0, float(step), step=step), 2)
    assert [round_.step for round_ in rounds.incomplete()] == [7, 8, 9]
