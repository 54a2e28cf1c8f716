"""The order in which stages compute: complete, possible, and with no more kept than promised."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.parallel.schedule import StageAction, backward_only, forward_only, most_kept, schedule

names = st.sampled_from(["gpipe", "1f1b", "filled"])
stage_counts, micro_counts, aheads = st.integers(1, 6), st.integers(1, 12), st.integers(0, 2)


def ended(lists: list[list[StageAction]], room: int) -> list[int]:
    """How far stages get. What is sent to a stage needs one of `room` places there until it is used."""
    stages = len(lists)
    done: set[tuple[str, int, int]] = set()
    at = [0] * stages
    waiting: Counter[tuple[str, int]] = Counter()  # what has been sent to a stage, by kind

    def can(stage: int, action: StageAction) -> bool:
        if action.kind == "weights":
            return ("backward", stage, action.micro) in done
        step = -1 if action.kind == "forward" else 1
        if 0 <= stage + step < stages and (action.kind, stage + step, action.micro) not in done:
            return False
        if action.kind == "backward" and ("forward", stage, action.micro) not in done:
            return False
        return not 0 <= stage - step < stages or waiting[action.kind, stage - step] < room

    def do(stage: int, action: StageAction) -> None:
        done.add((action.kind, stage, action.micro))
        if action.kind != "weights":
            step = -1 if action.kind == "forward" else 1
            waiting[action.kind, stage] -= 0 <= stage + step < stages
            waiting[action.kind, stage - step] += 0 <= stage - step < stages

    went_on = True
    while went_on:
        went_on = False
        for stage, actions in enumerate(lists):
            while at[stage] < len(actions) and can(stage, actions[at[stage]]):
                do(stage, actions[at[stage]])
                at[stage] += 1
                went_on = True
    return at


@given(names, stage_counts, micro_counts, aheads)
def test_all_stages_get_through_without_waiting_for_each_other_forever(name, stages, micro, ahead):
    lists = [schedule(name, stage, stages, micro, ahead) for stage in range(stages)]
    assert ended(lists, room=micro) == [len(actions) for actions in lists]


@given(st.sampled_from(["1f1b", "filled"]), stage_counts, micro_counts, aheads)
def test_stages_get_through_with_room_for_as_many_values_as_a_hop_has_in_flight(name, stages, micro, ahead):
    lists = [schedule(name, stage, stages, micro, ahead) for stage in range(stages)]
    assert ended(lists, room=1 + ahead) == [len(actions) for actions in lists]


@given(names, stage_counts, micro_counts, aheads)
def test_every_stage_computes_every_part_of_every_micro_batch_once(name, stages, micro, ahead):
    kinds = ["forward", "backward", "weights"] if name == "filled" else ["forward", "backward"]
    for stage in range(stages):
        actions = schedule(name, stage, stages, micro, ahead)
        assert sorted((one.kind, one.micro) for one in actions) == sorted(
            (kind, m) for kind in kinds for m in range(micro)
        )


@given(names, stage_counts, micro_counts, aheads)
def test_backward_passes_come_in_ascending_order(name, stages, micro, ahead):
    for stage in range(stages):
        actions_of = schedule(name, stage, stages, micro, ahead)
        for actions in (actions_of, backward_only(actions_of)):
            for kind in {one.kind for one in actions} - {"forward"}:
                assert [one.micro for one in actions if one.kind == kind] == list(range(micro))


@given(stage_counts, micro_counts, aheads)
def test_a_stage_of_1f1b_keeps_as_many_as_stages_follow_and_one_more(stages, micro, ahead):
    for stage in range(stages):
        kept = most_kept(schedule("1f1b", stage, stages, micro, ahead))
        assert kept == min(micro, (1 + ahead) * (stages - 1 - stage) + 1)


@given(stage_counts, micro_counts, aheads)
def test_no_stage_of_filled_keeps_more_than_the_first_one_of_1f1b(stages, micro, ahead):
    most = most_kept(schedule("1f1b", 0, stages, micro, ahead))
    for stage in range(stages):
        assert most_kept(schedule("filled", stage, stages, micro, ahead)) <= most


@given(stage_counts, micro_counts, aheads)
def test_filled_has_forward_and_backward_passes_in_the_order_of_1f1b(stages, micro, ahead):
    for stage in range(stages):
        actions = schedule("filled", stage, stages, micro, ahead)
        assert [one for one in actions if one.kind != "weights"] == schedule(
            "1f1b", stage, stages, micro, ahead
        )


@given(stage_counts, micro_counts)
def test_gpipe_keeps_all_micro_batches(stages, micro):
    assert all(most_kept(schedule("gpipe", stage, stages, micro)) == micro for stage in range(stages))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_weights_wait_until_a_forward_pass_needs_their_memory(stage):
    actions = schedule("filled", stage, 3, 6)
    weights = [at for at, one in enumerate(actions) if one.kind == "weights"]
    forwards = [at for at, one in enumerate(actions) if one.kind == "forward"]
    assert all(at + 1 in forwards for at in weights if at < forwards[-1])


chunk_counts, worker_counts = st.integers(2, 4), st.integers(2, 5)


def took(lists: list[list[StageAction]], chunks: int, forward: int, backward: int) -> int:
    """How long the lists take on equal workers without wires; fails if they wait for each other forever."""
    workers, ended = len(lists), dict[tuple[str, int, int], int]()
    clock, at = [0] * workers, [0] * workers
    while any(at[worker] < len(lists[worker]) for worker in range(workers)):
        went_on = False
        for worker, actions in enumerate(lists):
            while at[worker] < len(actions):
                action = actions[at[worker]]
                part = action.chunk * workers + worker
                step = -1 if action.kind == "forward" else 1
                needs = [(action.kind, part + step, action.micro)] * (0 <= part + step < workers * chunks)
                needs += [("forward", part, action.micro)] * (action.kind == "backward")
                if any(need not in ended for need in needs):
                    break
                begun = max([clock[worker], *(ended[need] for need in needs)])
                clock[worker] = begun + (forward if action.kind == "forward" else backward)
                ended[action.kind, part, action.micro] = clock[worker]
                at[worker] += 1
                went_on = True
        assert went_on, (at, [len(actions) for actions in lists])
    return max(clock)


def interleaved(workers: int, chunks: int, micro: int, ahead: int = 0) -> list[list[StageAction]]:
    return [schedule("interleaved", one, workers, micro, ahead, chunks) for one in range(workers)]


@given(worker_counts, chunk_counts, micro_counts, aheads)
def test_interleaved_chunks_compute_every_pass_once_and_wait_for_none_forever(
    workers, chunks, micro, ahead
):
    lists = interleaved(workers, chunks, micro, ahead)
    passes = sorted(
        (kind, m, c) for kind in ("forward", "backward") for m in range(micro) for c in range(chunks)
    )
    assert all(sorted((one.kind, one.micro, one.chunk) for one in actions) == passes for actions in lists)
    took(lists, chunks, 1, 2)
    took([forward_only(actions) + backward_only(actions) for actions in lists], chunks, 1, 2)
    for actions in lists:
        for kind in ("forward", "backward"):
            for chunk in range(chunks):
                found = [one.micro for one in actions if (one.kind, one.chunk) == (kind, chunk)]
                assert found == list(range(micro))


@given(worker_counts, chunk_counts, st.integers(1, 3))
def test_interleaved_chunks_make_the_time_of_waiting_shorter_by_their_number(workers, chunks, rounds):
    micro = rounds * workers
    one = [schedule("1f1b", stage, workers, micro) for stage in range(workers)]
    waited = took(one, 1, chunks, 2 * chunks) - 3 * chunks * micro
    assert waited == 3 * chunks * (workers - 1)
    lists = interleaved(workers, chunks, micro)
    assert took(lists, chunks, 1, 2) - 3 * chunks * micro == 3 * (workers - 1)
    for worker, actions in enumerate(lists):
        assert most_kept(actions) <= 2 * (workers - 1 - worker) + (chunks - 1) * workers + 1
