from __future__ import annotations

from itertools import pairwise

import msgspec
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
    late_at_round,
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
    assert judged.alone_s == {0: 0.0, 1: 0.0, 2: 4.0}
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


# Several meetings in a step ---------------------------------------------------------------------------


def _met(rank: int, *met: tuple[float, float], step: int = 0, deferred_s: float = 0.0) -> StepEnded:
    """A step with exchanges, and its round last; each is an arrival and a result."""
    *earlier, (arrival, result) = met
    listed, at = [], 0.0
    for came, left in earlier:
        listed.append((round((came - at) * 1e6), round((left - came) * 1e6)))
        at = left
    waits_s = sum(left - came for came, left in met)
    return msgspec.structs.replace(
        _step(rank, arrival, result - arrival, step=step),
        start=0.0,
        wait_s=waits_s + deferred_s,
        deferred_s=deferred_s,
        exchanges_us=listed,
    )


def test_a_worker_that_is_late_at_an_exchange_is_charged_although_all_reach_the_round_together():
    # Rank 1 sleeps before batch normalisation; from there on both go on at the same pace.
    steps = {0: _met(0, (1.0, 4.0), (5.0, 5.5)), 1: _met(1, (4.0, 4.0), (5.0, 5.5))}
    judged = judge(ObservedRound(0, steps))
    assert (judged.last, judged.spread_s) == (1, 3.0)
    assert judged.charged_s == {0: 0.0, 1: 3.0}
    assert judged.waited_s == {0: 3.0, 1: 0.0}


def test_lateness_of_different_workers_at_different_meetings_does_not_cancel():
    steps = {0: _met(0, (1.0, 4.0), (7.0, 7.5)), 1: _met(1, (4.0, 4.0), (5.0, 7.5))}
    judged = judge(ObservedRound(0, steps))
    assert judged.charged_s == pytest.approx({0: 2.0, 1: 3.0})
    assert judged.spread_s == pytest.approx(5.0)
    assert judge(ObservedRound(0, steps), "wait").charged_s == pytest.approx({0: 2.0, 1: 3.0})


def test_a_worker_that_nobody_waited_for_is_not_charged():
    # Rank 2 comes late, but only ranks 0 and 1 meet, as neighbours on a graph.
    steps = {rank: _met(rank, (came, left), (9.0, 9.0)) for rank, came, left in (
        (0, 1.0, 2.0), (1, 2.0, 2.0), (2, 8.0, 8.0),
    )}  # fmt: skip
    judged = judge(ObservedRound(0, steps))
    assert judged.spread_s == pytest.approx(1.0), "rank 0 waited for a second, and nobody for longer"


def test_where_nobody_waits_nobody_meets():
    steps = {0: _met(0, (3.0, 3.0)), 1: _met(1, (8.0, 8.0))}
    assert ObservedRound(0, steps).meetings == ()


@settings(max_examples=60)
@given(st.lists(st.lists(st.floats(0, 5, width=16), min_size=3, max_size=3), min_size=1, max_size=5))
def test_charges_sum_to_the_spread_at_any_number_of_meetings(work):
    """All leave a meeting when the last has come; each then works for a while of its own."""
    at, met, spread_s = 0.0, {rank: [] for rank in range(3)}, 0.0
    for works in work:
        arrivals = [at + own for own in works]
        at = max(arrivals) + 0.5
        spread_s += max(arrivals) - min(arrivals)
        for rank, came in enumerate(arrivals):
            met[rank].append((came, at))
    round_ = ObservedRound(0, {rank: _met(rank, *own) for rank, own in met.items()})
    for by in ("arrival", "wait"):
        judged = judge(round_, by)
        assert judged.spread_s == pytest.approx(spread_s, abs=1e-4)
        assert sum(judged.charged_s.values()) == pytest.approx(spread_s, abs=1e-4)
        assert judged.charged_s[judged.last] == max(judged.charged_s.values())


def test_lateness_that_began_with_a_late_result_is_kept_apart():
    # Rank 1 gets the first result two seconds after rank 0, and then is as fast as rank 0.
    before = ObservedRound(0, {0: _met(0, (1.0, 2.0)), 1: _met(1, (1.0, 4.0))})
    after = ObservedRound(1, {0: _met(0, (5.0, 7.5), step=1), 1: _met(1, (7.0, 7.5), step=1)})
    judged = judge(after, "arrival", before)
    assert (judged.charged_s[1], judged.late_result_s[1]) == (2.0, 2.0)
    slow = ObservedRound(0, {0: _met(0, (1.0, 2.0)), 1: _met(1, (1.0, 2.0))})
    assert judge(after, "arrival", slow).late_result_s == {0: 0.0, 1: 0.0}


def test_of_workers_that_wait_for_the_round_before_the_one_that_waits_least_is_late():
    steps = {
        rank: _met(rank, (came, came), step=3, deferred_s=deferred_s)
        for rank, came, deferred_s in ((0, 5.0, 2.0), (1, 4.0, 0.1), (2, 5.0, 2.0))
    }
    round_ = ObservedRound(3, steps)
    judged = judge(round_)
    assert judged.last == 1
    assert judged.charged_s == pytest.approx({0: 0.0, 1: 1.9, 2: 0.0})
    assert judged.waited_s == pytest.approx({0: 1.9, 1: 0.0, 2: 1.9})
    assert late_at_round(round_) == pytest.approx(judged.waited_s)


def test_deferred_rounds_contradict_only_if_one_was_reached_before_all_had_been_at_the_one_before():
    def deferred(step, *arrivals):
        workers = {
            rank: _met(rank, (came, came), step=step, deferred_s=0.5) for rank, came in enumerate(arrivals)
        }
        return ObservedRound(step, workers)

    assert not contradicts(deferred(1, 4.0, 6.0))
    assert not contradicts(deferred(1, 4.0, 6.0), deferred(0, 1.0, 3.5))
    assert contradicts(deferred(1, 4.0, 6.0), deferred(0, 1.0, 4.5))


def test_a_round_tells_its_samples_and_mean_loss():
    steps = {
        rank: msgspec.structs.replace(_step(rank, 1.0), share=share, loss=loss)
        for rank, share, loss in ((0, 3, 1.0), (1, 1, 5.0), (2, 4, None), (3, 4, float("nan")))
    }
    round_ = ObservedRound(0, steps)
    assert (round_.samples, round_.loss) == (12, 2.0)
    assert (round_.begin, round_.end) == (0.0, 2.0)
