"""`order="near"` for any chunks, machines and shares: every row once, shares kept, as near as can be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.data.near import Placement, near_order
from echelon.plan.shares import ShareTable, batch_sizes

HOSTS = ["a", "b", "c", "d"]


@st.composite
def placements(draw):
    workers = draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=8))
    total, batch = sum(rows), draw(st.integers(workers, 40))
    if total < workers:
        rows[0] += workers
        total += workers
    drop_last = draw(st.booleans()) and total >= batch
    return Placement(
        chunk_rows=rows,
        chunk_hosts=[draw(st.sampled_from(HOSTS)) for _ in rows],
        worker_hosts=[draw(st.sampled_from(HOSTS[:3])) for _ in range(workers)],
        weights=[draw(st.sampled_from([0.5, 1, 2, 7])) for _ in range(workers)],
        sizes=batch_sizes(total, batch, workers, drop_last=drop_last),
    )


def host_of_row(placement):
    return [
        host
        for host, rows in zip(placement.chunk_hosts, placement.chunk_rows, strict=True)
        for _ in range(rows)
    ]


def chunk_of_row(placement):
    return [number for number, rows in enumerate(placement.chunk_rows) for _ in range(rows)]


def rows_by_worker(placement, order):
    """What each worker draws of the order, as the shared loader cuts it."""
    table, sizes = ShareTable(placement.weights), placement.sizes
    return [
        [
            row
            for number, size in enumerate(sizes)
            for part in [table.slice_of(0, number, size, rank, start=sizes.start(number))]
            for row in order[part.start : part.stop]
        ]
        for rank in range(len(placement.weights))
    ]


@settings(max_examples=200, deadline=None)
@given(placements(), st.integers(0, 3), st.booleans())
def test_every_row_is_in_the_order_once(placement, seed, shuffle):
    order = near_order(placement, seed=seed, shuffle=shuffle).tolist()
    assert sorted(order) == list(range(sum(placement.chunk_rows)))


@settings(max_examples=200, deadline=None)
@given(placements(), st.integers(0, 3), st.booleans())
def test_as_many_rows_are_near_as_shares_allow(placement, seed, shuffle):
    order = near_order(placement, seed=seed, shuffle=shuffle).tolist()
    drawn = rows_by_worker(placement, order)
    assert [len(rows) for rows in drawn] == placement.quotas()
    where = host_of_row(placement)
    near = sum(
        where[row] == host for rows, host in zip(drawn, placement.worker_hosts, strict=True) for row in rows
    )
    have = Counter(where)
    quotas = Counter()
    for host, quota in zip(placement.worker_hosts, placement.quotas(), strict=True):
        quotas[host] += quota
    assert near == sum(min(have[host], quotas[host]) for host in quotas)


@settings(max_examples=200, deadline=None)
@given(placements(), st.integers(0, 3), st.booleans())
def test_no_worker_draws_from_a_chunk_that_it_was_not_said_to_need(placement, seed, shuffle):
    order = near_order(placement, seed=seed, shuffle=shuffle).tolist()
    chunk = chunk_of_row(placement)
    for rows, needed in zip(rows_by_worker(placement, order), placement.needed(), strict=True):
        assert {chunk[row] for row in rows} <= needed


def test_machines_with_balanced_rows_need_no_chunk_of_another():
    placement = Placement(
        chunk_rows=[30, 10, 20, 20],
        chunk_hosts=["a", "b", "b", "b"],
        worker_hosts=["a", "b"],
        weights=[3, 5],
        sizes=batch_sizes(80, 8, 2, drop_last=False),
    )
    assert placement.needed() == [{0}, {1, 2, 3}]


def test_order_differs_by_seed_and_is_the_rows_own_without_shuffling():
    placement = Placement(
        chunk_rows=[10, 10],
        chunk_hosts=["a", "b"],
        worker_hosts=["a", "b"],
        weights=[1, 1],
        sizes=batch_sizes(20, 4, 2, drop_last=False),
    )
    first, second = (near_order(placement, seed=seed, shuffle=True).tolist() for seed in (1, 2))
    assert first != second
    assert near_order(placement, seed=1, shuffle=False)[:8].tolist() == [0, 1, 10, 11, 2, 3, 12, 13]
