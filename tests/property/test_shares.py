"""For any shares and batch sizes, every sample of an epoch goes to exactly one worker."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ConfigError
from echelon.plan.shares import ShareTable, batch_sizes, split

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


@st.composite
def epochs(draw):
    """Workers' weights, a data set and a batch that they can share."""
    shares = draw(weights)
    samples = draw(st.integers(len(shares), 300))
    batch = draw(st.integers(len(shares), 80))
    return shares, samples, batch


def slices(sizes, shares, rank, start=0):
    """One worker's part of each batch."""
    table = ShareTable(shares)
    return [
        table.slice_of(0, index, size, rank, start=start + sizes.start(index))
        for index, size in enumerate(sizes)
    ]


@given(weights, st.integers(0, 1000))
def test_shares_sum_to_the_batch_and_every_worker_gets_a_sample(shares, more):
    total = len(shares) + more
    parts = split(total, shares)
    assert sum(parts) == total
    assert min(parts) >= 1


@given(weights, st.integers(0, 1000))
def test_shares_are_within_one_sample_of_proportion_unless_that_is_below_one(shares, more):
    total = len(shares) + more
    wanted = [total * weight / sum(shares) for weight in shares]
    if min(wanted) >= 1:
        for part, want in zip(split(total, shares), wanted, strict=True):
            assert abs(part - want) < 1 + 1e-9


@given(weights, st.integers(0, 1000), st.floats(0.001, 1000))
def test_larger_weight_never_gets_a_smaller_share_and_scale_does_not_matter(shares, more, scale):
    total = len(shares) + more
    parts = split(total, shares)
    ranked = sorted(zip(shares, parts, strict=True))
    for (lighter, less), (heavier, least) in pairwise(ranked):
        assert less <= least or math.isclose(lighter, heavier)
    assert (
        sum(abs(a - b) for a, b in zip(parts, split(total, [w * scale for w in shares]), strict=True)) <= 2
    )


@given(epochs(), st.booleans())
def test_an_epoch_gives_every_sample_to_one_worker_once(epoch, drop_last):
    shares, samples, batch = epoch
    sizes = batch_sizes(samples, batch, len(shares), drop_last=drop_last)
    parts = [list(slices(sizes, shares, rank)) for rank in range(len(shares))]
    seen = sorted(i for mine in parts for part in mine for i in range(part.start, part.stop))
    assert seen == list(range(samples - samples % batch if drop_last else samples))
    for step, size in enumerate(sizes):
        assert sum(mine[step].share for mine in parts) == size == parts[0][step].batch
        assert all(mine[step].share >= 1 for mine in parts)


@given(epochs())
def test_batches_differ_from_one_process_only_by_a_merged_small_tail(epoch):
    shares, samples, batch = epoch
    alone = list(batch_sizes(samples, batch, 1, drop_last=False))
    together = list(batch_sizes(samples, batch, len(shares), drop_last=False))
    if alone[-1] >= len(shares):
        assert together == alone
    else:
        assert together == [*alone[:-2], alone[-2] + alone[-1]]


@given(epochs(), st.data())
def test_epoch_resumed_at_any_batch_continues_with_the_same_batches(epoch, data):
    shares, samples, batch = epoch
    sizes = batch_sizes(samples, batch, len(shares), drop_last=False)
    done = data.draw(st.integers(0, len(sizes)))
    position = sizes.start(done)
    assert position == sum(list(sizes)[:done])
    rest = batch_sizes(samples - position, batch, len(shares), drop_last=False)
    assert list(rest) == list(sizes)[done:]
    for rank in range(len(shares)):
        resumed = list(slices(rest, shares, rank, start=position))
        assert resumed == list(slices(sizes, shares, rank))[done:]


@pytest.mark.parametrize("shares", [[], [1, 0], [1, -1], [1, math.nan], [math.inf, 1]])
def test_a_weight_that_is_not_positive_is_refused(shares):
    with pytest.raises(ConfigError, match="each must be a positive number"):
        split(8, shares)


def test_a_batch_smaller_than_the_number_of_workers_is_refused():
    with pytest.raises(ConfigError, match="a batch of 3 cannot be shared by 4 workers"):
        split(3, [1] * 4)


@given(
    st.integers(2, 5).flatmap(
        lambda workers: st.lists(
            st.tuples(st.lists(st.integers(1, 9), min_size=workers, max_size=workers), st.integers(1, 6)),
            min_size=1,
            max_size=4,
        )
    ),
    st.integers(8, 40),
)
def test_every_sample_is_seen_once_while_shares_change_even_if_a_worker_has_drawn_ahead(changes, batch):
    workers = len(changes[0][0])
    tables = [ShareTable([1.0] * workers) for _ in range(workers)]
    drawn = [0] * workers
    parts: dict[int, list[tuple[int, int]]] = {}

    def draw(rank):
        part = tables[rank].slice_of(7, drawn[rank], batch, rank, start=drawn[rank] * batch)
        assert sum(part.parts) == batch
        parts.setdefault(drawn[rank], []).append((part.start, part.stop))
        drawn[rank] += 1

    for weights, ahead in changes:
        for rank in range(workers):
            for _ in range(2 + (ahead if rank == workers - 1 else 0)):
                draw(rank)
        first = max(drawn)
        for rank in range(workers):
            tables[rank].change(weights, {7: first})
    last = max(drawn)
    for rank in range(workers):  # the others have stayed behind over all changes
        while drawn[rank] <= last:
            draw(rank)
    for number, found in parts.items():
        samples = [sample for start, stop in sorted(found) for sample in range(start, stop)]
        assert samples == list(range(number * batch, (number + 1) * batch))


def test_a_loader_that_was_not_there_at_a_change_has_the_new_shares_from_its_first_batch():
    table = ShareTable([1.0, 1.0])
    table.change([3.0, 1.0], {0: 5})
    assert table.slice_of(0, 4, 8, 0).parts == (4, 4)
    assert table.slice_of(0, 5, 8, 0).parts == (6, 2)
    assert table.slice_of(1, 0, 8, 1).parts == (6, 2)
