from __future__ import annotations

import json
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.observe.events import (
    LAUNCHER,
    EpochEnded,
    Evaluated,
    RunEnded,
    RunStarted,
    StepEnded,
    WorkerFailed,
    WorkerJoined,
)
from echelon.observe.summary import Summary, Tally, summarise, write_summary


def _figures(summary: Summary) -> dict[str, object]:
    """All figures by name, so that floats can be compared with a tolerance."""
    flat = {}
    for name, value in msgspec.to_builtins(summary).items():
        if name == "workers":
            for worker in value:
                flat |= {f"{worker['rank']}.{key}": field for key, field in worker.items()}
        else:
            flat[name] = value
    return flat


def _same(one: Summary, other: Summary) -> None:
    left, right = _figures(one), _figures(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert right[name] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value), name


def test_the_figures_of_an_ordinary_run(imagined):
    events = imagined()
    summary = summarise(events)
    steps = [event for event in events if isinstance(event, StepEnded)]
    assert (summary.world_size, summary.steps, summary.epochs) == (4, 120, 3)
    assert summary.samples == 120 * 64
    assert summary.seconds == pytest.approx(max(s.t for s in steps) - min(s.start for s in steps))
    assert summary.samples_per_s == pytest.approx(summary.samples / summary.seconds)
    assert (summary.outcome, summary.failure) == ("completed", "")
    last = [event for event in events if isinstance(event, Evaluated)][-1]
    assert (summary.test_loss, summary.accuracy) == (last.loss, last.accuracy)
    first = summary.workers[0]
    own = [step for step in steps if step.rank == 0]
    assert first.node == "node-a"
    assert first.compute_s == pytest.approx(sum(step.compute_s for step in own))
    assert first.sent_bytes == 120 * 180_000
    assert first.samples_per_s == pytest.approx(first.samples / sum(step.t - step.start for step in own))
    assert first.mean_share == 16


def test_parts_of_the_time_sum_to_the_time_in_steps(imagined):
    for worker in summarise(imagined()).workers:
        parts = worker.data_s + worker.compute_s + worker.wait_s + worker.apply_s + worker.other_s
        assert parts == pytest.approx(worker.step_s)
        assert 0 <= worker.late_s <= worker.wait_s


def test_the_slow_worker_is_found_by_arrival(imagined):
    summary = summarise(imagined())
    assert summary.judged_by == "arrival"
    assert summary.rounds == 120
    slowest = max(summary.workers, key=lambda worker: worker.held_up_s)
    assert slowest.rank == 3
    assert slowest.times_last > 110
    assert sum(worker.times_last for worker in summary.workers) == summary.rounds
    assert sum(worker.held_up_s for worker in summary.workers) == pytest.approx(summary.spread_s)
    assert 0 < slowest.alone_s <= slowest.held_up_s


def test_disagreeing_clocks_do_not_change_the_detected_straggler(imagined, a_plan):
    true = summarise(imagined())
    skewed = summarise(imagined(a_plan(skew_s=(0.0, 5.0, -3.0, 1.0))))
    assert skewed.judged_by == "wait"
    assert skewed.spread_s == pytest.approx(true.spread_s, rel=1e-6)
    assert [w.times_last for w in skewed.workers] == [w.times_last for w in true.workers]


def test_train_loss_is_the_mean_over_samples_of_the_last_tenth(imagined, a_plan):
    events = imagined(a_plan(shares=(40, 16, 6, 2), epochs=5))
    last = [e for e in events if isinstance(e, StepEnded) and e.step >= 180]
    expected = sum(e.share * e.loss for e in last) / sum(e.share for e in last)
    assert summarise(events).train_loss == pytest.approx(expected)


def test_short_runs_take_their_train_loss_from_ten_steps(imagined, a_plan):
    events = imagined(a_plan(epochs=1, steps_per_epoch=12))
    last = [e for e in events if isinstance(e, StepEnded) and e.step >= 2]
    assert summarise(events).train_loss == pytest.approx(sum(e.loss for e in last) / len(last))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), asked=st.integers(1, 60))
def test_the_summary_does_not_depend_on_the_order_of_workers_or_on_earlier_calls(
    imagined, a_plan, seed, asked
):
    events = imagined(a_plan(seed=seed, epochs=2, steps_per_epoch=60, gaps=(7, 8), faults=True))
    shuffled: list = []
    queues = [[e for e in events if e.rank == rank] for rank in range(-1, 4)]
    chance = random.Random(seed)
    while any(queues):
        queue = chance.choice([q for q in queues if q])
        shuffled.append(queue.pop(0))
    tally = Tally()
    for index, event in enumerate(shuffled):
        tally.add(event)
        if index % (10 * asked) == 0:
            tally.summary()
    _same(tally.summary(), summarise(events))


def test_without_the_launchers_event_the_world_is_the_workers_seen(imagined):
    events = [event for event in imagined() if event.rank != LAUNCHER]
    summary = summarise(events)
    assert (summary.world_size, summary.rounds, summary.outcome) == (4, 120, "unfinished")
    _same(
        summary,
        msgspec.structs.replace(summarise(imagined()), outcome="unfinished"),
    )


def test_only_steps_that_all_workers_reported_are_judged(imagined, a_plan):
    summary = summarise(imagined(a_plan(gaps=(3, 4, 5))))
    assert summary.rounds == 117
    assert summary.steps == 120


def test_a_worker_that_died_is_named_with_its_cause(imagined, a_plan):
    summary = summarise(imagined(a_plan(dies=(2, 50))))
    assert summary.outcome == "failed"
    assert summary.failure == "rank 2 (node-c): killed by signal 9"
    assert [worker.steps for worker in summary.workers] == [51, 51, 50, 51]
    assert summary.rounds == 50


def test_the_first_failure_is_the_one_that_counts():
    failures = [
        WorkerFailed(t=5.0, rank=0, failed=1, node="b", cause="lost its peer"),
        WorkerFailed(t=4.0, rank=LAUNCHER, failed=3, node="d", cause="out of memory"),
    ]
    assert summarise(failures).failure == "rank 3 (d): out of memory"
    assert summarise(failures).outcome == "failed"


def test_an_interrupted_run_says_why():
    summary = summarise([RunEnded(t=1.0, rank=LAUNCHER, outcome="interrupted", detail="SIGINT")])
    assert (summary.outcome, summary.failure) == ("interrupted", "SIGINT")


def test_the_launchers_outcome_counts():
    ends = [
        RunEnded(t=1.0, rank=LAUNCHER, outcome="failed"),
        RunEnded(t=2.0, rank=0, outcome="completed"),
    ]
    assert summarise(ends).outcome == summarise(reversed(ends)).outcome == "failed"


def test_without_events_all_figures_are_zero():
    summary = summarise([])
    assert (summary.steps, summary.samples, summary.seconds, summary.samples_per_s) == (0, 0, 0.0, 0.0)
    assert summary.train_loss is summary.accuracy is None
    assert (summary.outcome, summary.workers) == ("unfinished", ())


def test_a_run_that_never_stepped_still_knows_its_workers():
    joined = WorkerJoined(t=1.0, rank=0, node="a", host="h", pid=1, threads=1, device="cpu")
    started = RunStarted(t=0.0, rank=LAUNCHER, run="r", command=[], world_size=2)
    summary = summarise([started, joined])
    assert (summary.world_size, summary.workers[0].node, summary.workers[0].samples_per_s) == (2, "a", 0.0)


def test_losses_that_are_missing_or_not_finite_are_left_out(imagined, a_plan):
    assert summarise(imagined(a_plan(losses=False))).train_loss is None
    events = [
        msgspec.structs.replace(e, loss=math.nan) if isinstance(e, StepEnded) and e.rank == 1 else e
        for e in imagined()
    ]
    loss = summarise(events).train_loss
    assert loss is not None
    assert math.isfinite(loss)


def test_single_worker_causes_no_waiting_time(imagined, a_plan):
    summary = summarise(imagined(a_plan(speeds=(800.0,), shares=(32,), nodes=("laptop",))))
    assert (summary.rounds, summary.spread_s) == (0, 0.0)
    assert (summary.workers[0].times_last, summary.workers[0].held_up_s) == (0, 0.0)


def test_an_epoch_counts_once_however_many_workers_end_it():
    ends = [EpochEnded(t=1.0, rank=rank, epoch=epoch, step=1) for rank in range(3) for epoch in (4, 5)]
    assert summarise(ends).epochs == 2


def test_the_summary_is_written_to_the_folder_as_json(folder, imagined, written):
    written(folder, imagined(), torn=True)
    summary = write_summary(folder)
    read = json.loads(folder.summary.read_text())
    assert read["samples_per_s"] == summary.samples_per_s
    assert [worker["node"] for worker in read["workers"]] == ["node-a", "node-b", "node-c", "node-d"]
    assert msgspec.convert(read, Summary) == summary
    assert [path.name for path in folder.path.iterdir() if path.is_file()] == ["summary.json"]


def test_a_run_without_events_has_a_summary_too(folder):
    assert write_summary(folder).steps == 0
    assert json.loads(folder.summary.read_text())["outcome"] == "unfinished"


def test_a_summary_that_cannot_be_written_says_where(folder, imagined, written):
    written(folder, imagined())
    folder.summary.mkdir()
    with pytest.raises(ConfigError, match=r"cannot write summary\.json") as caught:
        write_summary(folder)
    assert caught.value.where == str(folder.path)
    assert list(folder.path.glob(".summary*")) == []
