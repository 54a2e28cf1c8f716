"""Shares from measured costs: the last worker arrives as soon as any whole shares allow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import PlanError
from echelon.plan.job import ComputeCost, JobProfile, Layer
from echelon.plan.optimal_shares import best_shares, check_memory, most_share
from echelon.plan.topology import Node

GIB = 2.0**30
COSTS = st.builds(
    ComputeCost, fixed_s=st.floats(0, 3), per_sample_s=st.one_of(st.just(0.0), st.floats(1e-3, 2))
)
WORKER = st.tuples(COSTS, st.integers(1, 6), st.floats(0, 3))


def _last_s(costs, shares, after_s):
    return max(cost.at(share) + after for cost, share, after in zip(costs, shares, after_s, strict=True))


def _all_shares(batch, most):
    for shares in itertools.product(*(range(1, limit + 1) for limit in most)):
        if sum(shares) == batch:
            yield shares


@given(st.lists(WORKER, min_size=1, max_size=4), st.data())
def test_no_other_whole_shares_let_the_last_worker_arrive_sooner(workers, data):
    costs, most, after_s = zip(*workers, strict=True)
    batch = data.draw(st.integers(len(workers), sum(most)))
    shares = best_shares(costs, batch, most=most, after_s=after_s)
    assert sum(shares) == batch
    assert all(1 <= share <= limit for share, limit in zip(shares, most, strict=True))
    best_s = min(_last_s(costs, other, after_s) for other in _all_shares(batch, most))
    assert _last_s(costs, shares, after_s) <= best_s * (1 + 1e-12)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=60), st.integers(60, 100_000))
def test_large_shares_are_within_one_sample_of_equal_arrival(speeds, batch):
    costs = [ComputeCost(fixed_s=0.1 / speed, per_sample_s=1e-3 / speed) for speed in speeds]
    shares = best_shares(costs, batch)
    assert sum(shares) == batch
    last_s = _last_s(costs, shares, [0.0] * len(speeds))
    lasts = [s for c, s in zip(costs, shares, strict=True) if c.at(s) >= last_s * (1 - 1e-9)]
    with_one_more = [cost.at(share + 1) for cost, share in zip(costs, shares, strict=True)]
    assert min(lasts) == 1 or min(with_one_more) >= last_s * (1 - 1e-9)  # nobody could relieve the last


def test_shares_follow_speed_and_fixed_cost():
    fast, slow = ComputeCost(fixed_s=1, per_sample_s=1), ComputeCost(fixed_s=4, per_sample_s=4)
    assert best_shares([fast, slow], 15) == (13, 2)  # 14 s and 12 s; by speed alone 12, 3: 13 s and 16 s
    assert best_shares([fast, slow], 18) == (15, 3)  # 16 s and 16 s


def test_a_worker_with_a_slow_link_gets_fewer_samples_so_that_all_arrive_together():
    cost = ComputeCost(fixed_s=0, per_sample_s=1)
    assert best_shares([cost, cost], 10) == (5, 5)
    assert best_shares([cost, cost], 10, after_s=[0, 4]) == (7, 3)
    assert best_shares([cost, cost], 10, after_s=[0, 100]) == (9, 1)


def test_batch_smaller_than_the_workers_is_refused_with_the_number_that_fit():
    cost = ComputeCost(fixed_s=0, per_sample_s=1)
    with pytest.raises(PlanError, match="a batch of 3 cannot be shared by 4 workers") as caught:
        best_shares([cost] * 4, 3)
    assert "at most 3 workers" in caught.value.fix


def test_memory_that_holds_less_than_the_batch_is_refused():
    cost = ComputeCost(fixed_s=0, per_sample_s=1)
    with pytest.raises(PlanError, match="holds 5 samples"):
        best_shares([cost] * 2, 6, most=[2, 3])
    with pytest.raises(PlanError, match="rank 1 does not hold"):
        best_shares([cost] * 2, 6, most=[8, 0])


def _job(batch=96, base=4 * GIB, sample=GIB / 4):
    layer = Layer(name="only", size_bytes=1000)
    cost = ComputeCost(fixed_s=0.1, per_sample_s=0.01)
    return JobProfile(
        name="job", batch=batch, cost=cost, layers=(layer,), base_bytes=base, sample_bytes=sample
    )


@given(st.floats(0, 1e11), st.floats(0, 1e10), st.floats(0, 1e9), st.integers(1, 4096))
def test_the_largest_share_fits_and_one_more_does_not(memory, base, sample, batch):
    job = _job(batch, base, sample)
    share = most_share(job, Node(name="a", memory_bytes=memory))
    assert 0 <= share <= batch
    if share:
        assert job.memory_bytes(share) <= memory
    if share < batch:
        assert job.memory_bytes(share + 1) > memory * (1 - 1e-9)


def test_a_model_that_fits_nowhere_says_how_much_is_missing_where():
    nodes = [Node(name="a", memory_bytes=2 * GIB), Node(name="b", memory_bytes=3 * GIB)]
    with pytest.raises(PlanError) as caught:
        check_memory(_job(), nodes)
    assert str(caught.value).splitlines() == [
        "a worker needs 4.2 GiB for one sample, a has 2.0 GiB, b has 3.0 GiB",
        "  where: memory: 1.2 GiB are missing on b, which has most",
        "  fix:   use a smaller model, or a node with at least 4.2 GiB",
    ]


def test_a_batch_that_no_memory_holds_says_what_each_node_holds():
    nodes = [Node(name="a", memory_bytes=14 * GIB), Node(name="b", memory_bytes=5 * GIB)]
    with pytest.raises(PlanError, match="a batch of 96 does not fit: a holds 40, b holds 4") as caught:
        check_memory(_job(), nodes)
    assert "lower the batch to 44" in caught.value.fix
    assert "13.0 GiB are missing" in caught.value.where
    check_memory(_job(batch=44), nodes)
