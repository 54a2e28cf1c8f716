"""The order in which stages compute: complete, possible, and with no more kept than promised."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.schedule import most_kept, schedule

names = st.sampled_from(["gpipe", "1f1b"])
stage_counts, micro_counts, aheads = st.integers(1, 6), st.integers(1, 12), st.integers(0, 2)


@given(names, stage_counts, micro_counts, aheads)
def test_all_stages_get_through_without_waiting_for_each_other_forever(name, stages, micro, ahead):
    lists = [schedule(name, stage, stages, micro, ahead) for stage in range(stages)]
    done: set[tuple[str, int, int]] = set()
    at = [0] * stages
    went_on = True
    while went_on:
        went_on = False
        for stage, actions in enumerate(lists):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                forward = action.kind == "forward"
                needs = (
                    ("forward", stage - 1, action.micro)
                    if forward
                    else ("backward", stage + 1, action.micro)
                )
                if 0 <= needs[1] < stages and needs not in done:
                    break
                if not forward and ("forward", stage, action.micro) not in done:
                    break
                done.add((action.kind, stage, action.micro))
                at[stage] += 1
                went_on = True
    assert at == [2 * micro] * stages
    assert len(done) == 2 * micro * stages


@given(names, stage_counts, micro_counts, aheads)
def test_backward_passes_come_in_ascending_order(name, stages, micro, ahead):
    for stage in range(stages):
        actions = schedule(name, stage, stages, micro, ahead)
        assert [one.micro for one in actions if one.kind == "backward"] == list(range(micro))


@given(stage_counts, micro_counts, aheads)
def test_a_stage_of_1f1b_keeps_as_many_as_stages_follow_and_one_more(stages, micro, ahead):
    for stage in range(stages):
        kept = most_kept(schedule("1f1b", stage, stages, micro, ahead))
        assert kept == min(micro, (1 + ahead) * (stages - 1 - stage) + 1)


@given(stage_counts, micro_counts)
def test_gpipe_keeps_all_micro_batches(stages, micro):
    assert all(most_kept(schedule("gpipe", stage, stages, micro)) == micro for stage in range(stages))
