"""Decisions that a run takes by itself: what they were expected to bring, and what came of them."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.observe.closing import closing_table
from echelon.observe.decisions import decisions_of, decisions_verdict, shares_sentence
from echelon.observe.events import AnyEvent, CollectiveChanged, SharesChanged, StepEnded
from echelon.observe.page.decided import decided
from echelon.observe.page.history import collect_history
from echelon.observe.report import page_html
from echelon.observe.summary import Summary, summarise
from echelon.observe.verdict import verdict


def _steps(first: int, until: int, seconds: float, rank: int = 0) -> list[AnyEvent]:
    return [
        StepEnded(
            t=1000.0 + step + seconds, rank=rank, step=step, epoch=0, start=1000.0 + step, data_s=0.0,
            compute_s=seconds, arrival=1000.0 + step + seconds, wait_s=0.0, apply_s=0.0, share=1, batch=2,
            sent_bytes=1,
        )
        for step in range(first, until)
    ]  # fmt: skip


def _shares(step: int, expected_s: float, rank: int = 0) -> SharesChanged:
    return SharesChanged(
        t=1000.0 + step, rank=rank, step=step, shares=[3, 1], before=[2, 2], slowest=1, slowest_s=0.2,
        expected_s=expected_s,
    )  # fmt: skip


def _collective(step: int, expected_s: float, before_s: float) -> CollectiveChanged:
    return CollectiveChanged(
        t=1000.0 + step, rank=0, step=step, collective="direct", before="ring", reason="slow links",
        expected_s=expected_s, before_s=before_s,
    )  # fmt: skip


def test_what_came_of_shares_is_measured_from_three_steps_later():
    events = [*_steps(0, 10, 0.2), _shares(10, 0.1), *_steps(10, 13, 9.0), *_steps(13, 14, 0.125)]
    (found,) = decisions_of(events)
    assert (found.step, found.kind, found.what) == (10, "shares", "shares 3,1 (before 2,2)")
    assert found.before_s == pytest.approx(0.2)
    assert found.measured_s == pytest.approx(0.125)
    assert found.error_percent == pytest.approx(-20.0)


def test_a_step_that_is_reported_after_the_decision_still_counts_as_before_it():
    (found,) = decisions_of([_shares(10, 0.1), *_steps(9, 10, 0.2), *_steps(13, 14, 0.1)])
    assert found.before_s == pytest.approx(0.2)
    assert found.measured_s == pytest.approx(0.1)


def test_an_outcome_ends_with_the_next_decision():
    events = [
        *_steps(0, 10, 0.2),
        _shares(10, 0.1),
        *_steps(10, 20, 0.12),
        _shares(20, 0.08),
        *_steps(20, 30, 0.08),
    ]
    first, second = decisions_of(events)
    assert first.measured_s == second.before_s == pytest.approx(0.12)
    assert second.error_percent == pytest.approx(0.0)


def test_a_collective_is_expected_to_save_what_the_sum_of_gradients_saves():
    events = [*_steps(0, 10, 0.2), _collective(10, 0.05, 0.1), *_steps(13, 20, 0.15)]
    (found,) = decisions_of(events)
    assert (found.expected_s, found.instead_s) == (0.05, 0.1)
    assert found.expected_step_s == pytest.approx(0.15)
    assert found.error_percent == pytest.approx(0.0, abs=1e-6)


def test_two_decisions_in_one_step_have_one_outcome_and_both_expectations():
    events = [*_steps(0, 10, 0.2), _shares(10, 0.1), _collective(10, 0.01, 0.03), *_steps(10, 20, 0.08)]
    shares, collective = decisions_of(events)
    assert shares.measured_s is None
    assert shares.error_percent is None
    assert collective.before_s == pytest.approx(0.2)
    assert collective.expected_step_s == pytest.approx(0.08)
    assert collective.error_percent == pytest.approx(0.0, abs=1e-6)


def test_a_collective_without_a_prediction_or_steps_before_has_no_error():
    for decision in (_collective(10, 0.0, 0.0), _collective(0, 0.1, 0.2)):
        later = decision.step + 3
        earlier = _steps(0, decision.step, 0.2)
        (found,) = decisions_of([*earlier, decision, *_steps(later, later + 5, 0.1)])
        assert found.expected_step_s is None
        assert found.error_percent is None
        assert "no prediction could be compared" in decisions_verdict([found])


@given(
    stretches=st.lists(st.tuples(st.integers(4, 9), st.floats(0.01, 5.0)), min_size=2, max_size=6),
    expected_s=st.floats(0.01, 5.0),
)
def test_other_ranks_change_nothing_and_each_outcome_is_the_next_ones_before(stretches, expected_s):
    events: list[AnyEvent] = []
    others: list[AnyEvent] = []
    step = 0
    for count, seconds in stretches:
        if step:
            events.append(_shares(step, expected_s))
            others.append(_shares(step, 2 * expected_s, rank=1))
        events += _steps(step, step + count, seconds)
        others += _steps(step, step + count, 7.0, rank=1)
        step += count
    found = decisions_of(events)
    assert found == decisions_of([*others, *events])
    assert [one.measured_s for one in found] == [pytest.approx(s, abs=1e-6) for _, s in stretches[1:]]
    assert [one.before_s for one in found[1:]] == [one.measured_s for one in found[:-1]]


def test_sentences_tell_the_shares_and_how_good_the_prediction_was():
    found = decisions_of([*_steps(0, 10, 0.2), _shares(10, 0.1), *_steps(13, 30, 0.125)])
    assert (
        shares_sentence(found)
        == "Shares were balanced by measured speed from step 10 on: 3,1 (before 2,2)."
    )
    assert decisions_verdict(found) == (
        "One decision during the run; its prediction was 100.0 ms for a step, which took 125.0 ms "
        "(before 200.0 ms): -20 % off."
    )
    twice = shares_sentence([*found, msgspec.structs.replace(found[0], step=40, before="9,9")])
    assert "twice, last from step 40 on: 3,1 (at first 2,2)." in twice
    assert shares_sentence(()) == decisions_verdict(()) == decided(()) == ""


def test_the_summary_the_page_and_the_closing_text_have_the_decisions(rebalanced, a_plan):
    events = rebalanced(a_plan(epochs=1), (32, 16, 16, 8), steps=60)
    history = collect_history(events)
    summary = history.summary
    (found,) = summary.decisions
    assert msgspec.json.decode(msgspec.json.encode(summary), type=Summary) == summary
    page = page_html(history, [], title="demo", quoted={})
    assert "<h2>Decisions</h2>" in page
    assert "shares 32,16,16,8 (before 16,16,16,16)" in page
    said = decisions_verdict(summary.decisions)
    assert said in page
    assert said in [str(line) for line in closing_table(summary).renderables]
    assert f"{found.error_percent:+.0f} %" in page


def test_rounds_from_before_a_change_of_shares_are_not_judged(rebalanced, a_plan):
    # With equal shares rank 3 is last; with the new ones rank 0 is, in every round.
    events = rebalanced(a_plan(epochs=2), (60, 4, 4, 2), steps=60)
    summary = summarise(events)
    said = verdict(summary)
    assert said.startswith(
        "Shares were balanced by measured speed from step 80 on: 60,4,4,2 (before 16,16,16,16). Since "
        "then: Rank 0 (node-a) arrived last in 100 % of rounds and cost the others "
    )
    assert " of that time; shares follow measured speeds already: " in said
    assert summary.workers[3].times_last == 80
    assert summary.judged.workers[3].times_last == 0
    assert summary.judged.rounds == 57


def test_a_change_shortly_before_the_end_is_said_and_nobody_is_blamed(rebalanced, a_plan):
    said = verdict(summarise(rebalanced(a_plan(), (32, 16, 16, 8), steps=15)))
    assert "Shares changed shortly before the end" in said
    assert "arrived last" not in said
    assert "--shares" not in said
