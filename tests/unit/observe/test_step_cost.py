from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.observe.events import StepEnded
from echelon.observe.step_cost import CostTally, StepCost, balanced_shares


def _step(rank: int, share: int, busy_s: float) -> StepEnded:
    return StepEnded(
        t=0.0,
        rank=rank,
        step=0,
        epoch=0,
        start=0.0,
        data_s=0.25 * busy_s,
        compute_s=0.75 * busy_s,
        arrival=0.0,
        wait_s=0.0,
        apply_s=0.0,
        share=share,
        batch=64,
        sent_bytes=0,
    )


def _tally(speeds: list[float], fixed: float, shares: list[list[int]], times: int = 5) -> CostTally:
    """Steps that cost a worker `(fixed + share) / speed` milliseconds."""
    tally = CostTally()
    for each in shares:
        for _ in range(times):
            for rank, (share, speed) in enumerate(zip(each, speeds, strict=True)):
                tally.add(_step(rank, share, 0.001 * (fixed + share) / speed))
    return tally


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    st.floats(0.0, 50.0),
    st.integers(8, 100),
    st.integers(1, 6),
)
def test_fixed_and_per_sample_cost_are_found_from_steps_whose_shares_differ(speeds, fixed, usual, short):
    tally = _tally(speeds, fixed, [[usual] * len(speeds), [short] * len(speeds), [usual] * len(speeds)])
    for cost, speed in zip(tally.costs(), speeds, strict=True):
        assert cost.fixed_known
        assert cost.share == usual
        assert cost.fixed_s == pytest.approx(0.001 * fixed / speed, rel=1e-6, abs=1e-9)
        assert cost.per_sample_s == pytest.approx(0.001 / speed, rel=1e-6)


def test_outliers_do_not_move_the_costs():
    tally = _tally([1.0, 0.5], 6.0, [[20, 10], [20, 10], [4, 2]])
    tally.add(_step(0, 20, 5.0))
    tally.add(_step(1, 2, 5.0))
    slow = tally.costs()[1]
    assert (slow.fixed_s, slow.per_sample_s) == pytest.approx((0.012, 0.002))


def test_if_shares_never_differ_the_whole_cost_counts_as_proportional():
    (cost,) = _tally([0.5], 6.0, [[16]]).costs()
    assert not cost.fixed_known
    assert (cost.fixed_s, cost.usual_s) == pytest.approx((0.0, 0.044))


def test_a_cost_that_falls_with_the_share_counts_as_unknown():
    tally = CostTally()
    for share in (4, 16, 16):
        for _ in range(3):
            tally.add(_step(0, share, 1.0 / share))
    assert not tally.costs()[0].fixed_known


@pytest.mark.parametrize(("share", "busy_s"), [(0, 1.0), (8, 0.0)])
def test_a_worker_without_samples_or_time_has_no_cost(share, busy_s):
    tally = CostTally()
    tally.add(_step(0, share, busy_s))
    assert tally.costs() == ()


@given(
    st.lists(
        st.tuples(st.floats(0.0, 0.1), st.floats(1e-4, 0.1)),
        min_size=1,
        max_size=6,
    ),
    st.integers(6, 500),
)
def test_balanced_shares_sum_to_the_batch_and_take_equally_long(costs, batch):
    made = [
        StepCost(rank=rank, share=1, fixed_s=fixed_s, per_sample_s=per_sample_s)
        for rank, (fixed_s, per_sample_s) in enumerate(costs)
    ]
    shares = balanced_shares(made, batch)
    assert sum(shares.values()) == pytest.approx(batch)
    assert min(shares.values()) >= 1.0
    free_s = [cost.at(shares[cost.rank]) for cost in made if shares[cost.rank] > 1.0 + 1e-9]
    assert max(free_s, default=0.0) == pytest.approx(min(free_s, default=0.0))
    for cost in made:
        if free_s and shares[cost.rank] <= 1.0 + 1e-9:
            assert cost.at(1.0) >= max(free_s) * (1 - 1e-6)


def test_a_batch_of_fewer_samples_than_workers_gives_one_each():
    costs = [StepCost(rank=rank, share=1, fixed_s=0.0, per_sample_s=1.0) for rank in range(3)]
    assert balanced_shares(costs, 2) == {0: 1.0, 1: 1.0, 2: 1.0}


def test_balanced_shares_are_in_the_order_of_ranks_also_if_one_worker_gets_a_single_sample():
    slow, fast = (
        StepCost(rank=1, share=10, fixed_s=1.0, per_sample_s=0.1),
        StepCost(rank=0, share=10, fixed_s=0.0, per_sample_s=0.01),
    )
    assert list(balanced_shares([fast, slow], 20).items()) == [(0, 19.0), (1, 1.0)]
    assert list(balanced_shares([slow, fast], 20)) == [0, 1]
