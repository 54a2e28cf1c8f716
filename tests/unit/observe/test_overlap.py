"""Hidden communication and the limit of a step, by the definitions."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.arrival import ObservedRound
from echelon.observe.events import BucketReduced, LinkMeasured, StepEnded
from echelon.observe.overlap import (
    Traffic,
    figures,
    hidden_share,
    in_flight,
    merged,
    overall,
    slowest_links,
    traffic,
)
from echelon.observe.summary import Tally, summarise
from echelon.observe.verdict import wire_verdict

SECONDS = st.floats(0, 100)


def step(rank=0, number=0, *, compute_s=2.0, wait_s=1.0, sent_bytes=1000, start=100.0):
    return StepEnded(
        t=start + compute_s + wait_s, rank=rank, step=number, epoch=0, start=start, data_s=0.0,
        compute_s=compute_s, arrival=start + compute_s, wait_s=wait_s, apply_s=0.0, share=1, batch=2,
        sent_bytes=sent_bytes,
    )  # fmt: skip


def bucket(begun, ended, wait_s=0.0, rank=0, number=0):
    return BucketReduced(
        t=200.0, rank=rank, step=number, index=0, size_bytes=8, sent_bytes=8, start=begun, encode_s=0.0,
        begun=begun, sent=begun, ended=ended, adding_s=0.0, wait_s=wait_s,
    )  # fmt: skip


def link(rank, peer, bytes_per_s, t=0.0):
    return LinkMeasured(t=t, rank=rank, peer=peer, latency_s=1e-4, bytes_per_s=bytes_per_s)


def a_round(*steps):
    return ObservedRound(0, {one.rank: one for one in steps})


rounds = st.lists(st.tuples(SECONDS, SECONDS, st.integers(0, 10**9), SECONDS), min_size=1, max_size=5).map(
    lambda drawn: a_round(
        *(
            step(rank, compute_s=compute_s, wait_s=wait_s, sent_bytes=sent_bytes, start=start)
            for rank, (compute_s, wait_s, sent_bytes, start) in enumerate(drawn)
        )
    )
)
INTERVALS = st.lists(st.tuples(SECONDS, SECONDS).map(sorted).map(tuple), max_size=6).map(merged).map(tuple)
TRAFFIC = st.builds(Traffic, flights=st.none() | INTERVALS, waited_s=SECONDS)
traffics = st.dictionaries(st.integers(0, 4), TRAFFIC)
links = st.dictionaries(st.integers(0, 4), st.floats(1, 1e10)).map(
    lambda rates: {rank: link(rank, 9, rate) for rank, rate in rates.items()}
)


@given(st.lists(st.tuples(SECONDS, SECONDS).map(sorted).map(tuple), max_size=12))
@settings(max_examples=80)
def test_merged_intervals_cover_the_same_time_and_never_more_than_their_parts(intervals):
    apart = merged(intervals)
    covered_s = sum(end - begin for begin, end in apart)
    assert covered_s <= sum(end - begin for begin, end in intervals) + 1e-9
    assert covered_s >= max((end - begin for begin, end in intervals), default=0.0)
    assert all(one[1] < other[0] for one, other in pairwise(apart))
    for begin, end in intervals:
        assert any(low <= begin and end <= high for low, high in apart)
    assert merged(apart) == apart


@given(rounds, traffics, links, st.sampled_from(["arrival", "wait"]))
@settings(max_examples=80)
def test_exposed_is_part_of_communication_and_lateness_part_of_the_waiting(round_, went, known, by):
    for rank, worker in figures(round_, went, known, by).items():
        own = went.get(rank, Traffic())
        assert (worker.communication_s is None) == (own.flights is None)
        assert 0 <= worker.late_s <= own.waited_s
        if worker.communication_s is None:
            assert worker.exposed_s + worker.late_s == pytest.approx(own.waited_s)
        else:
            assert 0 <= worker.exposed_s <= worker.communication_s
            assert worker.exposed_s + worker.late_s <= own.waited_s + 1e-9
        assert (worker.wire_limit_s is None) == (rank not in known)


@given(rounds, traffics, links)
@settings(max_examples=80)
def test_a_link_only_raises_the_limit_which_is_at_least_the_compute_time(round_, went, known):
    with_links = overall([figures(round_, went, known)], known)
    without = overall([figures(round_, went, {})], {})
    assert with_links.limit_s >= without.limit_s == max(s.compute_s for s in round_.workers.values())
    if without.distance is not None:
        assert without.distance >= 1 - 1e-9
        assert with_links.distance <= without.distance
    else:
        assert without.limit_s <= 1e-9


@given(st.lists(st.tuples(rounds, traffics), min_size=1, max_size=6), links)
@settings(max_examples=80)
def test_all_figures_of_a_row_follow_from_its_medians_and_the_runs_are_between_the_rows(many, known):
    result = overall([figures(round_, went, known) for round_, went in many], known)
    for worker in result.workers:
        if worker.distance is not None:
            assert worker.distance * result.limit_s == pytest.approx(worker.step_s)
        if worker.hidden is not None:
            assert worker.exposed_s <= worker.communication_s
            assert worker.hidden == pytest.approx(1 - worker.exposed_s / worker.communication_s)
    assert result.distance == max(
        (w.distance for w in result.workers if w.distance is not None), default=None
    )
    hidden = [worker.hidden for worker in result.workers if worker.hidden is not None]
    assert (result.hidden is None) == (not hidden)
    if hidden:
        assert min(hidden) - 1e-9 <= result.hidden <= max(hidden) + 1e-9


@given(st.lists(rounds, min_size=1, max_size=5), links)
@settings(max_examples=60)
def test_the_worker_that_sets_the_limit_needs_at_least_as_long_as_any_other(many, known):
    result = overall([figures(round_, {}, known) for round_ in many], known)
    blamed = next(worker for worker in result.workers if worker.rank == result.rank)
    needed_s = blamed.compute_s if result.limited_by == "compute" else blamed.wire_limit_s
    assert needed_s == max(max(w.compute_s, w.wire_limit_s or 0.0) for w in result.workers)


def test_a_step_with_immeasurably_short_compute_time_has_no_distance():
    short = figures(a_round(step(0, compute_s=5e-324, wait_s=1.0, sent_bytes=0, start=0.0)), {}, {})
    assert overall([short], {}).distance is None


def test_overlapping_buckets_count_once_and_those_without_times_not_at_all():
    buckets = [bucket(1.0, 3.0, 0.5), bucket(2.0, 4.0, 0.25), bucket(6.0, 7.0), bucket(0.0, 0.0, 2.0)]
    assert in_flight(buckets) == [(1.0, 4.0), (6.0, 7.0)]
    assert traffic(buckets) == Traffic(flights=((1.0, 4.0), (6.0, 7.0)), waited_s=2.75)
    assert traffic([bucket(0.0, 0.0, 2.0)]) == Traffic(flights=None, waited_s=2.0)


@pytest.mark.parametrize(
    ("exposed_s", "communication_s", "share"),
    [
        (0.0, 2.0, 1.0),
        (0.5, 2.0, 0.75),
        (2.0, 2.0, 0.0),
        (3.0, 2.0, 0.0),
        (0.0, 0.0, None),
        (1.0, 0.0, None),
    ],
)
def test_the_hidden_share_is_communication_that_the_trainer_did_not_wait_for(
    exposed_s, communication_s, share
):
    assert hidden_share(exposed_s, communication_s) == share


def test_waiting_for_a_late_worker_does_not_count_as_communication():
    # Rank 1 arrives two seconds after rank 0; after that, the wire takes one more second.
    early, late = step(0, compute_s=2.0, wait_s=3.0), step(1, compute_s=4.0, wait_s=1.0)
    went = {
        0: Traffic(flights=((101.0, 105.0),), waited_s=3.0),
        1: Traffic(flights=((103.0, 105.0),), waited_s=1.0),
    }
    first, second = overall([figures(a_round(early, late), went, {})], {}).workers
    assert (first.late_s, first.exposed_s, first.communication_s, first.hidden) == (2.0, 1.0, 2.0, 0.5)
    assert (second.late_s, second.exposed_s, second.communication_s, second.hidden) == (0.0, 1.0, 2.0, 0.5)


def test_communication_that_began_after_the_late_worker_came_is_not_taken_off_again():
    # In shared memory nothing is in flight before the last worker has arrived.
    early, late = step(0, compute_s=2.0, wait_s=3.0), step(1, compute_s=4.0, wait_s=1.0)
    went = {
        rank: Traffic(flights=((104.2, 105.0),), waited_s=wait_s) for rank, wait_s in ((0, 3.0), (1, 1.0))
    }
    for worker in figures(a_round(early, late), went, {}).values():
        assert (worker.communication_s, worker.exposed_s) == pytest.approx((0.8, 0.8))


def test_the_worker_that_waits_least_for_a_deferred_round_is_the_late_one():
    def deferred(rank, arrival, deferred_s):
        made = step(rank, 1, start=arrival - 1.0, compute_s=1.0, wait_s=deferred_s)
        return msgspec.structs.replace(made, arrival=arrival, deferred_s=deferred_s)

    round_ = a_round(deferred(0, 20.0, 4.0), deferred(1, 19.0, 1.0))
    went = {
        0: Traffic(flights=((9.0, 14.0),), waited_s=4.0),
        1: Traffic(flights=((12.0, 14.0),), waited_s=1.0),
    }
    early, late = figures(round_, went, {}).values()
    assert (early.late_s, early.exposed_s, early.communication_s) == (3.0, 1.0, 2.0)
    assert (late.late_s, late.exposed_s, late.communication_s) == (0.0, 1.0, 2.0)


def test_the_slowest_link_counts_by_its_latest_measurement():
    known = slowest_links(
        [link(0, 1, 50.0), link(0, 2, 100.0), link(0, 1, 200.0), link(1, 0, 0.0), link(2, 0, float("inf"))]
    )
    assert {rank: (one.peer, one.bytes_per_s) for rank, one in known.items()} == {0: (2, 100.0)}


def test_the_wire_limit_is_the_bytes_at_the_rate_of_the_slowest_link():
    steps = a_round(step(0, sent_bytes=1000), step(1, sent_bytes=3000))
    workers = figures(steps, {}, slowest_links([link(0, 1, 100.0), link(1, 0, 1000.0)]))
    assert [worker.wire_limit_s for worker in workers.values()] == [10.0, 3.0]
    result = overall([workers], {})
    assert (result.limit_s, result.distance) == (10.0, 0.3)


@pytest.mark.parametrize(("count", "left"), [(3, 3), (4, 3), (1, 1)])
def test_the_first_of_more_than_three_rounds_is_warm_up(count, left):
    slow_first = [figures(a_round(step(compute_s=50.0 if n == 0 else 2.0)), {}, {}) for n in range(count)]
    result = overall(slow_first, {})
    assert result.rounds == left
    assert result.workers[0].compute_s == (50.0 if count == 1 else 2.0)


def test_without_rounds_there_are_no_figures():
    assert overall([], {}) is None


def test_communication_of_a_run_is_summarised_from_its_events(imagined, a_plan):
    went = summarise(imagined(a_plan(buckets=4, links=((0, 1, 180e4), (1, 0, 360e4))))).communication
    assert went.rounds == 119
    assert (went.limited_by, went.rank, went.limit_s) == ("link", 0, pytest.approx(0.1))
    assert 0 < went.hidden < 1
    assert [worker.wire_limit_s for worker in went.workers] == [0.1, 0.05, None, None]
    assert [worker.sent_bytes for worker in went.workers] == [180_000] * 4
    assert all(worker.exposed_s == pytest.approx(0.004, abs=1e-6) for worker in went.workers)
    assert went.workers[0].late_s > went.workers[1].late_s > went.workers[3].late_s == 0


def test_the_order_in_which_workers_events_come_does_not_matter(imagined, a_plan):
    merged_by_time = imagined(a_plan(buckets=2))
    by_worker = sorted(merged_by_time, key=lambda event: -event.rank)
    assert summarise(by_worker).communication == summarise(merged_by_time).communication


def test_a_run_without_buckets_has_no_communication_and_no_sentence(imagined, a_plan):
    summary = summarise(imagined(a_plan(links=((0, 1, 1e6),))))
    assert summary.communication is None
    assert wire_verdict(summary) == ""


def test_a_summary_of_an_older_version_can_be_read(imagined):
    summary = summarise(imagined())
    raw = msgspec.to_builtins(summary)
    del raw["communication"]
    assert msgspec.convert(raw, type(summary)) == summary


def test_a_tally_with_a_limit_keeps_no_buckets(imagined, a_plan):
    tally = Tally(limit=10)
    for event in imagined(a_plan(buckets=2)):
        tally.add(event)
    assert tally.summary().communication is None


def test_buckets_of_a_step_that_never_ended_are_not_counted_with_the_next(imagined, a_plan):
    events = imagined(a_plan(buckets=2, epochs=1, steps_per_epoch=1))
    stray = [bucket(1.0, 50.0, 40.0, rank=0, number=-1)]
    assert summarise([*stray, *events]).communication == summarise(events).communication


def test_a_group_that_reports_no_times_has_a_limit_but_no_hidden_share(imagined, a_plan):
    summary = summarise(imagined(a_plan(buckets=2, timed=False)))
    assert summary.communication.hidden is None
    text = wire_verdict(summary)
    assert text.startswith("A step took 1.")
    assert " ms of computing on rank 3 (node-d)." in text
    assert "hidden" not in text


def test_a_link_to_a_worker_that_reported_nothing_is_named_by_its_rank(imagined, a_plan):
    text = wire_verdict(summarise(imagined(a_plan(buckets=2, links=((2, 9, 1000.0),)))))
    assert "3 min 0 s for 180.0 kB at 1.0 kB/s on the link from rank 2 (node-c) to rank 9." in text
    assert "So the link was faster than measured at the start." in text
