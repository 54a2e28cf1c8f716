"""Real workers draw from real loaders: every sample once, in the order that one process has."""

from __future__ import annotations

import os

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

import echelon

SHARES = {1: None, 2: (3, 1), 3: (1, 2, 1), 4: (1, 1, 2, 3)}


class Stream(IterableDataset):
    """Numbers from 0, of which a loader's processes take turns."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        return iter(range(self.count) if info is None else range(info.id, self.count, info.num_workers))


class Pairs(Sampler):
    """Batches of 4 and 6 in turn, in an order that is drawn anew for every pass."""

    def __iter__(self):
        order = torch.randperm(25).tolist()
        for start in (0, 10):
            yield order[start : start + 4]
            yield order[start + 4 : start + 10]

    def __len__(self):
        return 4


def numbers(count):
    return TensorDataset(torch.arange(count))


LOADERS = {
    "in order": lambda: DataLoader(numbers(23), batch_size=5),
    "shuffled": lambda: DataLoader(numbers(24), batch_size=5, shuffle=True),
    "dropping": lambda: DataLoader(numbers(23), batch_size=5, shuffle=True, drop_last=True),
    "small tail": lambda: DataLoader(numbers(21), batch_size=5, shuffle=True),
    "one batch": lambda: DataLoader(numbers(7), batch_size=100, shuffle=True),
    "sampler": lambda: DataLoader(
        numbers(9), batch_size=5, sampler=WeightedRandomSampler(torch.arange(9.0), 24)
    ),
    "batch sampler": lambda: DataLoader(numbers(25), batch_sampler=Pairs()),
    "stream": lambda: DataLoader(Stream(23), batch_size=5),
    "one process": lambda: DataLoader(numbers(23), batch_size=5, shuffle=True, num_workers=1),
    "two processes": lambda: DataLoader(numbers(23), batch_size=5, num_workers=2),
    "stream of two processes": lambda: DataLoader(Stream(46), batch_size=5, num_workers=2),
}


def draw_all(seed, epochs, names):
    """By loader and epoch, the batches that this worker draws."""
    drawn = {}
    shares = SHARES[int(os.environ.get("WORLD_SIZE", "1"))]
    with echelon.join(record=False, seed=seed, round_timeout_s=90, shares=shares) as session:
        torch.manual_seed(seed + session.rank)  # a sampler's randomness is the leader's
        for name in names:
            loader = session.prepare(LOADERS[name]())
            drawn[name] = [
                [(b if isinstance(b, torch.Tensor) else b[0]).tolist() for b in loader]
                for _ in range(epochs)
            ]
            assert name.startswith("stream") or len(loader) == len(drawn[name][0])
    return drawn


@pytest.fixture(scope="module")
def alone():
    """The samples that one process draws."""
    return draw_all(5, 2, LOADERS)


@pytest.fixture(scope="module", params=[2, 3, 4])
def cluster(request, warm_pool):
    """The samples that each worker draws, and the number of workers."""
    return request.param, warm_pool.run(request.param, draw_all, 5, 2, list(LOADERS))


@pytest.mark.parametrize("name", LOADERS)
def test_workers_draw_the_batches_that_one_process_draws(alone, cluster, name):
    workers, drawn = cluster
    for epoch in range(2):
        parts = [worker[name][epoch] for worker in drawn]
        together = [[i for part in batch for i in part] for batch in zip(*parts, strict=True)]
        assert all(part for batch in zip(*parts, strict=True) for part in batch), (
            "nobody is without a sample"
        )
        assert together == joined(alone[name][epoch], workers)


def joined(batches, workers):
    """A batch too small for all is part of the one before it."""
    out = []
    for batch in batches:
        if out and len(batch) < workers:
            out[-1] = out[-1] + batch
        else:
            out.append(batch)
    return out


@pytest.mark.parametrize(
    "name", [name for name in LOADERS if name not in ("sampler", "dropping", "batch sampler")]
)
def test_every_sample_is_drawn_once_per_epoch(cluster, name):
    _, drawn = cluster
    dataset = LOADERS[name]().dataset
    count = dataset.count if isinstance(dataset, Stream) else len(dataset)
    for epoch in range(2):
        assert sorted(i for worker in drawn for batch in worker[name][epoch] for i in batch) == list(
            range(count)
        )


def test_order_differs_between_epochs_and_between_seeds(warm_pool, alone):
    names = ["shuffled", "sampler", "batch sampler"]
    other = warm_pool.run(2, draw_all, 6, 1, names)
    for name in names:
        first, second = alone[name]
        assert first != second
        assert [a + b for a, b in zip(other[0][name][0], other[1][name][0], strict=True)] != first


def test_shares_are_proportional_to_the_weights(cluster):
    workers, drawn = cluster
    sizes = [len(worker["one batch"][0][0]) for worker in drawn]
    assert sizes == {2: [5, 2], 3: [2, 3, 2], 4: [1, 1, 2, 3]}[workers]
