"""Which tensors differ between workers, and on whom; which saves are left out; which streams are left."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.train import drift, streams
from echelon.train.saving import WholeSaves


def test_checksum_follows_values_shape_and_type():
    zeros = torch.zeros(2, 3)
    others = [torch.zeros(3, 2), torch.zeros(2, 3).double(), zeros + 1e-38, -zeros, None]
    assert len({drift.checksum(one) for one in (zeros, *others)}) == 6
    assert drift.checksum(zeros) == drift.checksum(torch.zeros(3, 2).t().clone())
    assert drift.checksum(torch.arange(6.0).view(2, 3).t()) == drift.checksum(
        torch.tensor([[0.0, 3], [1, 4], [2, 5]])
    )
    assert drift.checksum(torch.empty(0)) != 0


@given(st.integers(2, 6), st.data())
def test_the_minority_is_named_for_the_first_tensor_that_differs(workers, data):
    sums = [[1, 2, 3] for _ in range(workers)]
    wrong = data.draw(st.sets(st.integers(0, workers - 1), max_size=(workers - 1) // 2))
    for rank in wrong:
        sums[rank][1] = 9
        sums[rank][2] = 8
    found = drift.first_difference(["a", "b", "c"], sums)
    assert (found is None) == (not wrong)
    if found is not None:
        assert found == drift.Difference("b", tuple(sorted(wrong)))


def test_of_two_workers_that_differ_the_second_is_named():
    assert drift.first_difference(["a"], [[1], [2]]).ranks == (1,)


def test_first_tensor_that_is_not_finite_is_named():
    fine, huge = torch.ones(3), torch.full((4,), 3e38)
    assert drift.first_not_finite([("a", fine), ("b", huge), ("c", torch.arange(3))]) == ""
    assert drift.first_not_finite([("a", fine), ("d", torch.tensor([1, float("nan")]))]) == "d"


@pytest.fixture
def seeded():
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(3)
    np.random.seed(3)
    random.seed(3)
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def test_only_streams_that_a_lower_rank_has_are_left(seeded):
    mine = streams.digests()
    assert streams.digests() == mine, "looking draws nothing"
    assert streams.fork(0, [mine, mine]) == []
    assert streams.digests() == mine
    other = [mine[0], 1, 2]
    assert streams.alike([mine, other])
    assert not streams.alike([mine, [1, 2, 3]])
    assert streams.fork(1, [other, mine]) == ["torch"]
    assert streams.digests()[0] != mine[0]
    assert streams.digests()[1:] == mine[1:]


def test_every_draw_changes_the_digest_of_its_stream(seeded):
    for index, draw in enumerate((lambda: torch.rand(1), np.random.rand, random.random)):
        before = streams.digests()
        draw()
        after = streams.digests()
        assert [a == b for a, b in zip(before, after, strict=True)] == [at != index for at in range(3)]


def saves(rank, counts):
    def count(key, more):
        counts[key] = counts.get(key, 0) + more
        return counts[key]

    return WholeSaves(rank, 0, count)


def test_a_save_that_the_first_worker_has_made_is_left_out_and_no_other(tmp_path):
    counts = {}
    path = tmp_path / "model.pt"
    own = torch.save
    for rank, value, left in [(1, "b1", "b1"), (0, "a1", "a1"), (0, "a2", "a2")]:
        saving = saves(rank, counts)
        saving.install()
        try:
            torch.save(value, path)
        finally:
            saving.remove()
        assert torch.load(path) == left
        assert torch.save is own
    saving = saves(1, counts)
    saving.install()
    try:
        torch.save("b1 again", path)
        assert torch.load(path) == "a2", "the first worker has saved as often already"
        torch.save("b2", path)
        torch.save("b3", path)
        assert torch.load(path) == "b3", "the first worker has not"
        with (tmp_path / "open.pt").open("wb") as file:
            torch.save(1, file)
        with pytest.raises(AttributeError):
            torch.save(lambda: 0, path)
    finally:
        saving.remove()
    assert torch.load(path) == "b3", "a failed save leaves the file as it was"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["model.pt", "open.pt"]
