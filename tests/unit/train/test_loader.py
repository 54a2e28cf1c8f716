"""A shared loader draws the right samples; each rank of a simulated group is tested in turn."""

from __future__ import annotations

import logging
from itertools import count, islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import echelon
from echelon.comm.alone import SoloGroup
from echelon.errors import ConfigError, DataError
from echelon.observe.recorder import Recorder
from echelon.plan.shares import ShareTable
from echelon.train.clock import StepClock
from echelon.train.loader import SharedLoader, Sharing


class Pretend(SoloGroup):
    """One member of a group of any size, without communication."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size


class Stream(IterableDataset):
    """Numbers from 0, of which a loader's processes take turns."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(self.count) if info is None else range(info.id, self.count, info.num_workers))


class Backwards(Sampler):
    """From the last to the first, without a length."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(reversed(range(self.count)))


class Growing(Sampler):
    """Batches of 4, 5, 6, ..."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        start = 0
        for size in range(4, 4 + self.batches):
            yield torch.arange(start, start + size).numpy()
            start += size

    def __len__(self):
        return self.batches


def numbers(count):
    return TensorDataset(torch.arange(count))


def shared(loader, *, rank=0, workers=1, weights=None, seed=0, index=0, meaning="global"):
    seen = []
    sharing = Sharing(
        group=Pretend(rank, workers),
        shares=ShareTable(weights or [1.0] * workers),
        seed=seed,
        clock=StepClock(Recorder(None), rank),
        device=torch.device("cpu"),
        on_pass=lambda _: None,
        on_batch=lambda _, part, data: seen.append((part.share, part.batch)),
    )
    made = SharedLoader(loader, index, sharing, meaning)
    made.seen = seen
    return made


def drawn(loader):
    """One pass: its batches as lists of numbers."""
    return [(batch if isinstance(batch, torch.Tensor) else batch[0]).tolist() for batch in loader]


def flat(batches):
    return [number for batch in batches for number in batch]


def together(make, workers, **options):
    """The global batches of one pass, each the parts of all ranks in order."""
    parts = [drawn(shared(make(), rank=rank, workers=workers, **options)) for rank in range(workers)]
    return [flat(batch) for batch in zip(*parts, strict=True)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_sample_is_drawn_once_for_any_sizes_and_shares(data):
    workers = data.draw(st.integers(1, 5))
    samples, batch = data.draw(st.integers(workers, 60)), data.draw(st.integers(workers, 20))
    weights = data.draw(st.lists(st.sampled_from([0.5, 1, 2, 7]), min_size=workers, max_size=workers))
    options = {"shuffle": data.draw(st.booleans()), "batch_size": batch}
    batches = together(lambda: DataLoader(numbers(samples), **options), workers, weights=weights)
    assert sorted(flat(batches)) == list(range(samples))
    alone = drawn(shared(DataLoader(numbers(samples), **options)))
    assert flat(batches) == flat(alone), "the order does not depend on the number of workers"


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_stream_is_split_between_workers_without_loss_or_repetition(workers):
    def make():
        return DataLoader(Stream(22), batch_size=7)

    batches = together(make, workers, weights=[3.0, 1.0, 1.0, 2.0][:workers])
    tail = [list(range(14, 22))] if workers > 1 else [list(range(14, 21)), [21]]
    assert batches == [list(range(7)), list(range(7, 14)), *tail]


def test_number_of_loader_processes_does_not_change_the_drawn_samples():
    for workers in (1, 2):
        for dataset in (numbers(23), Stream(23)):
            loader = shared(DataLoader(dataset, batch_size=5, num_workers=workers))
            assert sorted(flat(drawn(loader))) == list(range(23))


def test_persistent_loader_processes_follow_the_order_of_each_epoch():
    loader = shared(
        DataLoader(numbers(12), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    )
    first = drawn(loader)
    for _ in loader:
        break
    third = drawn(loader)
    assert sorted(flat(first)) == sorted(flat(third)) == list(range(12))
    assert first != third


def test_epochs_and_seeds_and_loaders_are_shuffled_differently():
    def make(**options):
        return shared(DataLoader(numbers(40), batch_size=8, shuffle=True), **options)

    loader = make()
    first, second = drawn(loader), drawn(loader)
    assert drawn(make()) == first
    assert len({str(order) for order in (first, second, drawn(make(seed=1)), drawn(make(index=1)))}) == 4


def test_same_seed_always_gives_the_same_order():
    """A resumed run depends on this, in another process and with another version."""
    loader = shared(DataLoader(numbers(8), batch_size=8, shuffle=True), seed=7)
    assert drawn(loader) == [[4, 7, 5, 2, 0, 1, 3, 6]]


def test_drawing_batches_does_not_change_the_global_random_state():
    before = torch.get_rng_state()
    drawn(shared(DataLoader(numbers(20), batch_size=4, shuffle=True)))
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_are_drawn_in_the_order_of_a_sampler():
    torch.manual_seed(5)
    expected = list(WeightedRandomSampler([0.0, 1.0, 2.0, 3.0], 12))
    torch.manual_seed(5)
    sampler = WeightedRandomSampler([0.0, 1.0, 2.0, 3.0], 12)
    assert flat(drawn(shared(DataLoader(numbers(4), batch_size=5, sampler=sampler)))) == expected
    backwards = shared(DataLoader(numbers(7), batch_size=3, sampler=Backwards(7)))
    assert drawn(backwards) == [[6, 5, 4], [3, 2, 1], [0]]


def test_batches_are_those_of_a_batch_sampler():
    loader = shared(DataLoader(numbers(15), batch_sampler=Growing(3)))
    assert drawn(loader) == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14]]
    assert len(loader) == 3
    with pytest.raises(AttributeError, match="no single batch size"):
        _ = loader.batch_size


def test_torch_batch_sampler_is_split_into_its_sampler_and_batch_size():
    sampler = BatchSampler(Backwards(10), batch_size=4, drop_last=True)
    loader = shared(DataLoader(numbers(10), batch_sampler=sampler))
    assert loader.batch_size == 4
    assert drawn(loader) == [[9, 8, 7, 6], [5, 4, 3, 2]]


def test_a_workers_batch_size_is_its_share():
    loader = shared(DataLoader(numbers(30), batch_size=12), rank=1, workers=3, weights=[1, 3, 2])
    assert (loader.batch_size, loader.global_batch_size, len(loader)) == (6, 12, 3)
    drawn(loader)
    assert loader.seen == [(6, 12), (6, 12), (3, 6)]


def test_global_batch_is_the_sum_of_per_worker_batches():
    loader = shared(DataLoader(numbers(51), batch_size=4), rank=2, workers=3, meaning="per-worker")
    assert (loader.batch_size, loader.global_batch_size, len(loader)) == (4, 12, 5)


def test_a_tail_smaller_than_the_number_of_workers_joins_the_batch_before():
    batches = together(lambda: DataLoader(numbers(13), batch_size=4), 3)
    assert [len(batch) for batch in batches] == [4, 4, 5]
    assert len(shared(DataLoader(numbers(13), batch_size=4), workers=3)) == 3


def test_data_smaller_than_a_batch_is_one_batch_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        loader = shared(DataLoader(numbers(7), batch_size=100))
    assert "7 samples are fewer than a batch of 100" in caplog.text
    assert drawn(loader) == [list(range(7))]


@pytest.mark.parametrize(
    ("loader", "workers", "error", "told"),
    [
        (
            DataLoader(numbers(9), batch_size=3),
            4,
            ConfigError,
            "a batch of 3 cannot be shared by 4 workers",
        ),
        (DataLoader(numbers(3), batch_size=8), 4, DataError, "3 samples cannot be shared by 4 workers"),
        (DataLoader(numbers(7), batch_size=8, drop_last=True), 1, DataError, "do not make one batch of 8"),
        (DataLoader(numbers(8), batch_size=None), 1, ConfigError, "takes ready batches from a data set"),
        (DataLoader(Stream(8), batch_size=None), 1, ConfigError, "takes ready batches from an iterable"),
        (
            DataLoader(numbers(8), batch_size=2, sampler=DistributedSampler(numbers(8), 2, 0)),
            2,
            ConfigError,
            "Echelon shares the data out itself",
        ),
        (
            DataLoader(
                numbers(8), batch_sampler=BatchSampler(DistributedSampler(numbers(8), 2, 0), 2, False)
            ),
            2,
            ConfigError,
            "Echelon shares the data out itself",
        ),
    ],
    ids=[
        "small-batch",
        "few",
        "nothing-left",
        "ready",
        "ready-stream",
        "distributed",
        "distributed-batches",
    ],
)
def test_unsupported_loaders_are_refused_with_a_fix(loader, workers, error, told):
    with pytest.raises(error, match=told) as refused:
        shared(loader, workers=workers)
    assert refused.value.fix


def test_stream_or_sampler_with_fewer_samples_than_workers_is_refused():
    with pytest.raises(DataError, match="2 samples are left of this pass"):
        drawn(shared(DataLoader(Stream(2), batch_size=8), workers=3))
    with pytest.raises(DataError, match="2 samples are left of this pass"):
        drawn(shared(DataLoader(numbers(2), batch_size=8, sampler=Backwards(2)), workers=3))


def test_abandoned_epoch_is_not_resumed():
    loader = shared(DataLoader(numbers(12), batch_size=4))
    for _ in loader:
        break
    assert drawn(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


class Unsized(Sampler):
    """A permutation from a generator of its own, of unknown length."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self):
        return iter(torch.randperm(23, generator=self.generator).tolist())


class Forever(Sampler):
    """0, 1, 2, ... without an end."""

    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        for number in count():
            self.drawn += 1
            yield number % 50


class ForeverInPairs(Forever):
    def __iter__(self):
        return (list(pair) for pair in zip(*[super().__iter__()] * 2, strict=False))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("replacement", [True, False])
def test_sampler_of_ten_billion_samples_is_drawn_as_far_as_needed(workers, replacement):
    def make():
        data = numbers(50)
        sampler = RandomSampler(data, replacement=replacement, num_samples=10**10)
        return DataLoader(data, batch_size=20, sampler=sampler)

    def begun(rank, **options):
        loader = shared(make(), rank=rank, workers=workers, **options)
        assert len(loader) == 5 * 10**8
        return [batch[0].tolist() for batch in islice(loader, 6)]

    parts = [begun(rank) for rank in range(workers)]
    together = [flat(batch) for batch in zip(*parts, strict=True)]
    alone = shared(make())
    assert flat(together) == flat(batch[0].tolist() for batch in islice(alone, 6))
    if not replacement:
        assert sorted(flat(together)[:50]) == sorted(flat(together)[50:100]) == list(range(50))
        assert flat(together)[:50] != flat(together)[50:100]
    assert flat(begun(0, seed=1)) != flat(parts[0])


@pytest.mark.parametrize("processes", [0, 1])
def test_endless_samplers_are_drawn_a_few_batches_at_a_time(processes):
    sampler = Forever()
    loader = shared(DataLoader(numbers(50), batch_size=20, sampler=sampler, num_workers=processes))
    assert [batch[0].tolist() for batch in islice(loader, 3)][2] == [*range(40, 50), *range(10)]
    assert sampler.drawn < 200_000
    pairs = shared(DataLoader(numbers(50), batch_sampler=ForeverInPairs(), num_workers=processes))
    assert [batch[0].tolist() for batch in islice(pairs, 2)] == [[0, 1], [2, 3]]


def test_long_pass_of_a_sampler_without_a_length_ends_with_its_last_samples():
    class Few(Sampler):
        def __iter__(self):
            return iter(range(11))

    loader = DataLoader(numbers(11), batch_size=5, sampler=Few())
    assert drawn(shared(loader)) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10]]
    assert drawn(shared(loader, workers=2)) == [[0, 1, 2], [5, 6, 7]]


def test_sampler_that_fails_is_told_to_all_workers():
    class Broken(Sampler):
        def __iter__(self):
            yield 1
            raise ValueError("no more cards")

        def __len__(self):
            return 8

    with pytest.raises(DataError, match="the leader's sampler failed: ValueError: no more cards"):
        drawn(shared(DataLoader(numbers(8), batch_size=4, sampler=Broken())))


KINDS = {
    "in-order": lambda: DataLoader(numbers(23), batch_size=5),
    "shuffled": lambda: DataLoader(numbers(23), batch_size=5, shuffle=True),
    "sampler": lambda: DataLoader(numbers(23), batch_size=5, sampler=WeightedRandomSampler([1.0] * 23, 23)),
    "own-generator": lambda: DataLoader(
        numbers(23),
        batch_size=5,
        sampler=RandomSampler(range(23), replacement=True, generator=torch.Generator().manual_seed(4)),
    ),
    "batch-sampler": lambda: DataLoader(numbers(30), batch_sampler=Growing(5)),
    "draws": lambda: DataLoader(numbers(9), batch_size=5, sampler=RandomSampler(range(9), True, 23)),
    "permutations": lambda: DataLoader(
        numbers(9), batch_size=5, sampler=RandomSampler(range(9), False, 23)
    ),
    "no-length": lambda: DataLoader(numbers(23), batch_size=5, sampler=Unsized(4)),
    "stream": lambda: DataLoader(Stream(23), batch_size=5),
    "processes": lambda: DataLoader(numbers(23), batch_size=5, shuffle=True, num_workers=1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_epoch_resumed_in_the_middle_continues_with_the_next_sample(kind, tmp_path):
    with echelon.join(record=False) as session:
        torch.manual_seed(1)
        loader, optimizer = _trained_on(session, KINDS[kind]())
        whole = [_drawn_in_steps(loader, optimizer) for _ in session.epochs(3)]
    with echelon.join(record=False) as session:
        torch.manual_seed(1)
        loader, optimizer = _trained_on(session, KINDS[kind]())
        for epoch in session.epochs(3):
            before = _drawn_in_steps(loader, optimizer, stop_after=2 if epoch == 1 else None)
            if epoch == 1:
                session.save(tmp_path)
                break
    with echelon.join(record=False) as session:
        torch.manual_seed(99)  # as after a restart, nothing is as it was
        loader, optimizer = _trained_on(session, KINDS[kind]())
        session.load(tmp_path)
        after = {epoch: _drawn_in_steps(loader, optimizer) for epoch in session.epochs(3)}
    assert list(after) == [1, 2]
    assert before + after[1] == whole[1]
    assert after[2] == whole[2]


def _trained_on(session, loader):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session.prepare(loader, model, optimizer)[::2]


def _drawn_in_steps(loader, optimizer, stop_after=None):
    batches = []
    for batch in loader:
        batches.append((batch if isinstance(batch, torch.Tensor) else batch[0]).tolist())
        optimizer.step()
        if len(batches) == stop_after:
            break
    return batches
