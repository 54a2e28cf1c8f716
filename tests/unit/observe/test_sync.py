"""Figures from a server's record: every push is accounted for; ages and waiting times are right."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.observe.closing import closing_table
from echelon.observe.events import Arrived, Decided, RunStarted, StepEnded, WorkerJoined
from echelon.observe.page.history import collect_history
from echelon.observe.page.sync import synchronisation
from echelon.observe.report import write_report
from echelon.observe.summary import Summary, Tally, summarise, write_summary
from echelon.observe.sync import SyncTally, firsts_of, policy_of, steps_together
from echelon.observe.verdict import verdict

ASYNC = {"need": 1, "rounds": False, "sync": "async"}


def _push(t: float, worker: int, step: int = 0, read: int = 0, kind: str = "gradient", **more) -> Arrived:
    return Arrived(t=t, rank=4, worker=worker, kind=kind, step=step, read=read, **more)


def _apply(t: float, version: int, *parts: tuple[int, int]) -> Decided:
    listed = [(worker, step, 1.0) for worker, step in parts]
    return Decided(t=t, rank=4, what="apply", version=version, parts=listed)


def _release(t: float, worker: int, **more) -> Decided:
    return Decided(t=t, rank=4, what="release", version=0, worker=worker, **more)


def _kept(*events: Arrived | Decided) -> SyncTally:
    tally = SyncTally()
    for event in events:
        if isinstance(event, Arrived):
            tally.arrived(event)
        else:
            tally.decided(event)
    return tally


def test_the_age_of_a_gradient_is_the_updates_since_its_weights_were_read():
    tally = _kept(
        _push(1.0, 0), _apply(1.0, 1, (0, 0)), _push(2.0, 1), _apply(2.0, 2, (1, 0)),
        _push(3.0, 2), _push(3.5, 0, step=1, read=1), _apply(3.5, 3, (2, 0), (0, 1)),
    )  # fmt: skip
    figures = tally.figures("async", {})
    assert [worker.ages for worker in figures.workers] == [{0: 1, 1: 1}, {1: 1}, {2: 1}]
    assert (figures.age_mean, figures.age_most) == (1.0, 2)
    assert figures.parts == {1: 2, 2: 1}


def test_a_worker_is_held_from_its_arrival_to_its_release():
    tally = _kept(
        _push(1.0, 0), _push(1.5, 1), _apply(2.0, 1, (0, 0), (1, 0)), _release(2.0, 0), _release(2.25, 1)
    )
    assert [worker.held_s for worker in tally.figures("x", {}).workers] == [1.0, 0.75]


def test_an_ask_is_not_a_push_but_its_waiting_counts():
    invite = Decided(t=1.5, rank=4, what="invite", version=0, worker=0)
    tally = _kept(
        _push(1.0, 0, kind="ask"),
        invite,
        _push(2.0, 0, kind="delta"),
        _apply(2.25, 1, (0, 0)),
        _release(2.25, 0),
    )
    (worker,) = tally.figures("flexible", {}).workers
    assert (worker.pushed, worker.applied, worker.held_s) == (1, 1, 0.75)


def test_reasons_that_differ_only_in_numbers_count_together():
    drops = [
        Decided(
            t=1.0, rank=4, what="drop", version=1, worker=0, step=step, reason=f"left out of round {step}"
        )
        for step in range(3)
    ]
    assert _kept(*drops).figures("flexible", {}).dropped_for == {"left out of round": 3}


def test_updates_made_while_a_worker_was_gone_do_not_lower_its_share():
    tally = _kept(
        _push(1.0, 0), _apply(1.0, 1, (0, 0)), Arrived(t=1.1, rank=4, worker=0, kind="leave"),
        _push(2.0, 1), _apply(2.0, 2, (1, 0)), Arrived(t=2.1, rank=4, worker=0, kind="join"),
        _push(3.0, 1, step=1), _apply(3.0, 3, (1, 1)), Arrived(t=3.1, rank=4, worker=0, kind="leave"),
        _push(4.0, 1, step=2), _apply(4.0, 4, (1, 2)),
    )  # fmt: skip
    assert [worker.took_part for worker in tally.figures("x", {}).workers] == [0.5, 0.75]


def test_only_the_first_optimizer_counts():
    once = [_push(1.0, 0), _apply(1.0, 1, (0, 0)), _release(1.5, 0)]
    twice = [copy for event in once for copy in (event, msgspec.structs.replace(event, table=1))]
    assert _kept(*twice).figures("x", {}) == _kept(*once).figures("x", {})


@settings(max_examples=25, deadline=None)
@given(
    step_s=st.lists(st.sampled_from([0.01, 0.013, 0.02, 0.07]), min_size=2, max_size=5),
    need=st.integers(1, 5),
    rounds=st.booleans(),
    steps=st.integers(1, 150),
)
def test_every_push_is_applied_or_dropped_or_pending(
    imagined_served, a_served_plan, step_s, need, rounds, steps
):
    plan = a_served_plan(step_s=step_s, need=min(need, len(step_s)), rounds=rounds, steps=steps)
    figures = summarise(imagined_served(plan)).sync
    assert figures is not None
    assert figures.pushed == steps
    pending = figures.pushed - figures.applied - figures.dropped
    assert 0 <= pending < max(2, plan.need)
    assert figures.applied == figures.updates * plan.need
    assert figures.age_most == 0 or not rounds
    for worker in figures.workers:
        assert sum(worker.ages.values()) == worker.applied
        assert 0 <= worker.took_part <= 1
    for name in ("applied", "dropped"):
        for number, worker in enumerate(figures.workers):
            in_course = sum(getattr(stretch, name)[worker.rank] for stretch in figures.course)
            assert in_course == getattr(worker, name), number
    assert sum(stretch.updates for stretch in figures.course) == figures.updates
    assert len(figures.course) <= 20


def test_a_long_run_keeps_no_more_stretches_than_a_short_one():
    tally = _kept(*(_apply(float(n), n + 1, (0, n)) for n in range(50_000)))
    course = tally.course()
    assert 60 <= len(course) <= 120
    assert sum(stretch.updates for stretch in course) == 50_000


def test_with_a_server_there_are_no_rounds(imagined_served):
    events = imagined_served()
    summary = summarise(events)
    assert (summary.rounds, summary.spread_s, summary.communication) == (0, 0.0, None)
    assert all(w.times_last == w.held_up_s == w.late_s == 0 for w in summary.workers)
    assert summary.all_steps == sum(isinstance(event, StepEnded) for event in events)
    assert summary.samples == 8 * summary.all_steps
    assert len({worker.steps for worker in summary.workers}) > 1


def test_steps_seen_before_the_servers_events_leave_no_rounds(imagined_served, a_served_plan):
    events = imagined_served(a_served_plan(sync=""))
    late = sorted(events, key=lambda event: isinstance(event, (Arrived, Decided)))
    assert summarise(late).rounds == 0
    assert summarise(late).sync == summarise(events).sync


def test_asking_for_a_summary_in_between_changes_nothing(imagined_served):
    tally = Tally(limit=10)
    for event in imagined_served():
        tally.add(event)
        tally.summary()
    assert tally.summary() == summarise(imagined_served())


def test_train_loss_is_over_the_last_steps_of_every_worker(imagined_served, a_served_plan):
    summary = summarise(imagined_served(a_served_plan(**ASYNC, step_s=(0.001, 0.1), steps=3000)))
    # The slow worker's loss is 2, the fast one's 1; by number of step the slow one is far behind.
    assert summary.train_loss is not None
    assert summary.train_loss > 1.0


def test_a_policy_without_a_server_has_exchanges_and_no_rounds(imagined):
    summary = summarise(imagined(), "local(4)")
    assert summary.rounds == 0
    assert summary.sync is not None
    assert not summary.sync.served
    assert [worker.exchanges for worker in summary.sync.workers] == [120] * 4


@pytest.mark.parametrize("policy", ["", "full", "full()"])
def test_full_runs_have_no_sync_figures(imagined, policy):
    assert summarise(imagined(), policy) == summarise(imagined())
    assert summarise(imagined(), policy).sync is None


def test_the_policy_is_read_from_the_plan(folder, imagined, written):
    assert policy_of(folder) == ""
    folder.plan.write_bytes(b"sync = '\xff'")
    assert policy_of(folder) == ""
    folder.plan.write_text('sync = "gossip(ring)"\n')
    assert policy_of(folder) == "gossip(ring)"
    assert not steps_together("gossip(ring)")
    written(folder, imagined())
    summary = write_summary(folder)
    assert summary.sync is not None
    assert summary.sync.policy == "gossip(ring)"


def test_sync_figures_survive_json(folder, imagined_served, written):
    written(folder, imagined_served())
    summary = write_summary(folder)
    assert msgspec.convert(json.loads(folder.summary.read_text()), Summary, strict=False) == summary


def test_verdict_on_backup_contains_the_dropped_gradients(imagined_served):
    text = verdict(summarise(imagined_served()))
    assert text.startswith("backup(1): the server made 6")
    assert " updates, each from 3 of 4 gradients. It dropped 1" in text
    assert "of them from rank 3 (n3)." in text
    assert "Rank 3 (n3) was left out of 100 % of the updates, because it computes 5.5 times as long" in text
    assert "arrived last" not in text


def test_the_verdict_on_async_has_the_age_of_gradients(imagined_served, a_served_plan):
    text = verdict(summarise(imagined_served(a_served_plan(**ASYNC))))
    assert text.startswith("async: the server made 200 updates, each from one gradient. Gradients were 2.")
    assert text.endswith("at most. The policy made no worker wait.")


def test_the_verdict_on_rounds_of_all_names_the_slowest_worker(imagined_served, a_served_plan):
    text = verdict(summarise(imagined_served(a_served_plan(need=4, sync="percentage(1.0)"))))
    assert text.startswith("percentage(1.0): the server made 50 updates, each from 4 of 4 gradients. ")
    assert text.endswith(", because rank 3 (n3) computes 5.5 times as long as the others.")


def test_the_verdict_on_a_growing_buffer_says_how_it_grew():
    events = []
    for n in range(40):
        parts = [(worker, n) for worker in range(1 + n // 10)]
        events += [_push(float(n), worker, step=n, read=n) for worker, _ in parts]
        events += [_apply(float(n), n + 1, *parts)]
    known = {"step": 0, "epoch": 0, "start": 1.0, "data_s": 0.0, "compute_s": 0.5, "arrival": 1.5}
    known |= {"wait_s": 0.0, "apply_s": 0.0, "share": 8, "batch": 32, "sent_bytes": 1}
    steps = [StepEnded(t=2.0, rank=rank, **known) for rank in range(4)]
    text = verdict(summarise([*events, *steps], "smooth-switch(step=10)"))
    assert "40 updates, each from 2.5 gradients on average (1.0 at first, up to 4.0 later)" in text


@pytest.mark.parametrize(
    ("sent_bytes", "said"),
    [
        (5, "none: workers exchanged weights after 100 % of their steps. That took "),
        (0, "none: workers sent each other nothing during their steps; each took 120 steps."),
    ],
)
def test_without_a_server_the_verdict_has_the_exchanges(imagined, sent_bytes, said):
    events = [
        msgspec.structs.replace(event, sent_bytes=sent_bytes) if isinstance(event, StepEnded) else event
        for event in imagined()
    ]
    assert verdict(summarise(events, "none")).startswith(said)


# Groups that agree ---------------------------------------------------------------------------------

PAIRS = ((0, 1), (2, 3))


@pytest.fixture
def grouped(imagined_served, a_served_plan):
    """Events of two pairs of workers, the second pair slow; the server records the pairs' numbers."""

    def made(need=1, sync="levels(full, backup(1))", groups=PAIRS):
        events = []
        for event in imagined_served(a_served_plan(step_s=(0.01, 0.06), need=need, sync=sync)):
            if isinstance(event, RunStarted):
                events.append(msgspec.structs.replace(event, world_size=4))
            elif isinstance(event, (Arrived, Decided)):
                events.append(msgspec.structs.replace(event, rank=4))
            elif isinstance(event, WorkerJoined):
                events += [
                    msgspec.structs.replace(event, rank=rank, node=f"n{rank}")
                    for rank in groups[event.rank]
                ]
            elif isinstance(event, StepEnded):
                events += [msgspec.structs.replace(event, rank=rank) for rank in groups[event.rank]]
            else:
                events.append(event)
        return events

    return made


def _plan(folder, sync, groups=PAIRS):
    folder.plan.write_text(f'sync = "{sync}"\ngroups = {[list(group) for group in groups]}\n')


@pytest.mark.parametrize("groups", [PAIRS, ((0, 3), (1, 2)), ((3, 1), (0, 2))])
def test_a_groups_figures_are_those_of_its_first_rank(folder, grouped, written, groups):
    _plan(folder, "levels(full, backup(1))", groups)
    written(folder, grouped(groups=groups))
    figures = write_summary(folder).sync
    assert figures is not None
    workers = {worker.rank: worker for worker in figures.workers}
    fast, slow = groups[0][0], groups[1][0]
    assert workers.keys() == {fast, slow}
    assert (workers[fast].dropped, workers[slow].applied) == (0, 0)
    assert workers[slow].dropped == workers[slow].pushed > 10
    assert workers[fast].pushed == workers[fast].applied == figures.updates
    for stretch in figures.course:
        assert sum(stretch.applied) == stretch.applied[fast]
        assert sum(stretch.dropped) == stretch.dropped[slow]


def test_the_verdict_names_the_slow_groups_first_rank_and_counts_groups(grouped):
    text = verdict(summarise(grouped(), firsts=(0, 2)))
    assert "of them from rank 2 (n2)." in text
    assert "Rank 2 (n2) was left out of 100 % of the updates, because it computes 6.0 times as long" in text
    together = verdict(summarise(grouped(need=2, sync="levels(full, percentage(1.0))"), firsts=(0, 2)))
    assert "updates, each from 2 of 2 gradients. The policy made workers wait for" in together


def test_the_waiting_share_is_relative_to_the_time_of_pushing_ranks(
    grouped, imagined_served, a_served_plan
):
    """Members that do not push wait too, but must not count in the share."""
    plan = a_served_plan(step_s=(0.01, 0.06), need=2, sync="levels(full, percentage(1.0))")
    held = [
        verdict(summary).partition("made workers wait for ")[2].partition(" %")[0]
        for summary in (
            summarise(grouped(need=2, sync=plan.sync), firsts=(0, 2)),
            summarise(imagined_served(plan)),
        )
    ]
    assert held[0] == held[1] != ""


def test_ranks_that_never_push_have_empty_cells(grouped):
    columns = {
        str(column.header): [str(cell) for cell in column.cells]
        for column in _table(closing_table(summarise(grouped(), firsts=(0, 2)))).columns
    }
    fast, mate, slow, other = columns["dropped"]
    assert (fast, mate, other) == ("0", "", "")
    assert int(slow) > 10
    assert [bool(cell) for cell in columns["held"]] == [True, False, True, False]


def _table(drawn):
    return next(part for part in getattr(drawn, "renderables", [drawn]) if hasattr(part, "columns"))


def test_the_page_draws_a_row_for_each_group_only(folder, grouped, written):
    section = synchronisation(collect_history(grouped(), firsts=(0, 2)))
    assert "rank 2 (n2)" in section
    assert "rank 1" not in section
    assert "rank 3" not in section
    _plan(folder, "levels(full, backup(1))")
    written(folder, grouped())
    page = write_report(folder, folder.path / "page.html").read_text()
    assert "of them from rank 2 (n2)" in page


@pytest.mark.parametrize(
    ("sync", "groups", "firsts"),
    [
        ("levels(full, async)", PAIRS, (0, 2)),
        ("levels", ((3, 1), (0, 2)), (3, 0)),
        ("local(periods=[2, 4])", PAIRS, ()),
        ("levels(full, async)", ((0, 1), ()), ()),
        ("levels(full, async)", (("x",),), ()),
    ],
)
def test_groups_are_read_from_the_plan_with_levels_only(folder, sync, groups, firsts):
    assert firsts_of(folder) == ()
    _plan(folder, sync, groups)
    assert firsts_of(folder) == firsts
