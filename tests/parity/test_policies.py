"""Sync policies that wait for all workers give the results of one process, for any training loop.

A sampler orders the data, so workers claim parts of each batch in order of arrival; unshuffled data is
split by rank. Between `backward` and `step`, gradients are local to a worker.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset

from plain import assert_same, examples, in_session, network, plainly
from served import ServedRun, take_part

SYNCHRONOUS = [
    "backup(0)",
    "bounded-delay(0)",
    "smooth-switch(start=3, waiting=true)",
    "percentage(1.0)",
    "flexible(running-average(threshold=1000000000))",
]
EPOCHS = 7
BATCH = 12


def work(name, *args):
    return take_part(in_session, globals()[name], {}, *args)


class InOrder(torch.utils.data.Sampler):
    """Shuffled, but the same way with and without Echelon."""

    def __init__(self, count):
        self._order = torch.randperm(count, generator=torch.Generator().manual_seed(5)).tolist()

    def __iter__(self):
        return iter(self._order)

    def __len__(self):
        return len(self._order)


def loader_of(data, *, batch=BATCH, shuffled=True):
    """With a sampler, workers claim parts of batches; otherwise batches are split by rank."""
    return DataLoader(data, batch_size=batch, sampler=InOrder(len(data)) if shuffled else None)


def train(session, journal, model, optimizer, loader, overlap="backward", after_backward=lambda: None):
    model, optimizer, loader = session.prepare(model, optimizer, loader, overlap=overlap)
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            after_backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def momentum(session, journal, overlap="backward", shuffled=True):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    loader = loader_of(examples(), shuffled=shuffled)
    return train(session, journal, model, optimizer, loader, overlap)


def adamw(session, journal, overlap="backward"):
    """The biases have their own options."""
    model = network(session)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return train(session, journal, model, optimizer, loader_of(examples()), overlap)


def cut(session, journal, overlap="backward"):
    """Layers that are split between three servers and sent in several pieces."""
    torch.manual_seed(3 + 100 * session.rank)
    model = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 2100), nn.Tanh(), nn.Linear(2100, 96))
    model.append(nn.Linear(96, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    return train(session, journal, model, optimizer, loader_of(examples()), overlap)


def repeated():
    """Every worker of three has the same four samples of each batch, so their gradients are the same."""
    few = examples(20)
    return ConcatDataset([Subset(few, range(at, at + 4)) for at in range(0, 20, 4) for _ in range(3)])


def clipped(session, journal, overlap="backward"):
    """Clipping acts on a worker's local gradient, so all workers need the same gradient here."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    def clip():
        journal.note_figure(nn.utils.clip_grad_norm_(model.parameters(), 0.2))

    trained = train(
        session, journal, model, optimizer, loader_of(repeated(), shuffled=False), overlap, clip
    )
    assert min(journal.figures) < 0.2 < max(journal.figures), "some gradients are clipped, some are not"
    return trained


def scaled(session, journal, overlap="backward"):
    """Gradients that a script changes in place or replaces are pushed with the change."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def change():
        model[0].weight.grad.mul_(0.125)
        model[2].weight.grad = model[2].weight.grad * 0.25

    return train(session, journal, model, optimizer, loader_of(examples()), overlap, change)


def accumulated(session, journal, overlap="backward"):
    model = network(session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = loader_of(examples(54), shuffled=False, batch=6)
    model, optimizer, loader = session.prepare(model, optimizer, loader, overlap=overlap)
    pieces = 3
    for _ in session.epochs(EPOCHS):
        for index, (x, y) in enumerate(loader):
            last = index % pieces == pieces - 1
            with session.accumulate(not last):
                loss = F.cross_entropy(model(x), y)
                (loss / pieces).backward()
            journal.note(loss, len(x))
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model


def scheduled(session, journal, overlap="backward"):
    """The learning rate changes after every step and after every epoch; two schedulers, one prepared."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    model, optimizer, by_epoch, loader = session.prepare(
        model, optimizer, by_epoch, loader_of(examples()), overlap=overlap
    )
    by_step = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step % 3))
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            by_step.step()
            journal.note(loss, len(x))
        by_epoch.step()
        journal.note_figure(optimizer.param_groups[0]["lr"])
    return model


class Forked(nn.Module):
    """One layer is frozen, one is never used, one is used in the second half only."""

    def __init__(self):
        super().__init__()
        self.inner, self.frozen, self.outer = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.unused, self.later = nn.Linear(16, 3), nn.Linear(16, 3)
        self.frozen.requires_grad_(False)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        x = torch.tanh(self.frozen(torch.tanh(self.inner(x))))
        return self.outer(x) + (self.later(x) if self.steps > 15 else 0)


def forked(session, journal, overlap="backward"):
    """An unused parameter has no gradient, so the server applies no weight decay to it."""
    torch.manual_seed(3 + 100 * session.rank)
    model = Forked().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return train(session, journal, model, optimizer, loader_of(examples()), overlap)


def zeroed(session, journal, overlap="backward"):
    """Gradients are kept and set to zero, before the first backward and after every step."""
    model = network(session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, loader_of(examples()), overlap=overlap)
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            journal.note(loss, len(x))
    return model


def two_optimizers(session, journal, overlap="backward"):
    """Two tables on the servers."""
    model = network(session)
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.02)
    model, first, second, loader = session.prepare(
        model, first, second, loader_of(examples()), overlap=overlap
    )
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            first.zero_grad()
            second.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            first.step()
            second.step()
            journal.note(loss, len(x))
    return model


def check(pool, folder, sync, script, *args, workers=3, servers=1, rtol=1e-9, **asked):
    cluster = ServedRun(folder, workers=workers, servers=servers, sync=sync, **asked)
    trained, kept = cluster.run(pool, work, script.__name__, *args)
    assert_same(plainly(script, *args), trained, rtol=rtol)
    assert [one.waiting for one in kept] == [0] * servers, "no push is left over"
    return cluster, kept


@pytest.mark.parametrize(("servers", "overlap"), [(1, "step"), (3, "backward")])
@pytest.mark.parametrize("sync", SYNCHRONOUS)
def test_synchronous_policy_trains_like_one_process(warm_pool, tmp_path, sync, servers, overlap):
    check(warm_pool, tmp_path, sync, momentum, overlap, servers=servers)


@pytest.mark.parametrize("sync", SYNCHRONOUS)
def test_synchronous_policy_with_adam_on_the_server_trains_like_one_process(warm_pool, tmp_path, sync):
    check(warm_pool, tmp_path, sync, adamw, servers=3)


@pytest.mark.parametrize("overlap", ["backward", "step"])
@pytest.mark.parametrize(
    "script", [clipped, scaled, accumulated, scheduled, forked, zeroed, two_optimizers, cut]
)
def test_unusual_training_loops_end_like_one_process(warm_pool, tmp_path, script, overlap):
    check(warm_pool, tmp_path, "backup(0)", script, overlap, servers=3)


def test_unshuffled_data_is_split_by_rank_on_four_workers(warm_pool, tmp_path):
    check(warm_pool, tmp_path, "backup(0)", momentum, "backward", False, workers=4, servers=1)


def test_unequal_shares_are_weighted_by_their_samples(warm_pool, tmp_path):
    check(warm_pool, tmp_path, "backup(0)", momentum, "backward", False, shares="3,2,1")


def test_averaging_after_every_step_equals_full_synchronisation(warm_pool, tmp_path):
    check(warm_pool, tmp_path, "local(1)", momentum, "backward", False, workers=4, servers=0)


@pytest.mark.parametrize("script", [momentum, cut])
def test_replicas_equal_their_originals_to_the_bit(warm_pool, tmp_path, script):
    _, kept = check(warm_pool, tmp_path, "backup(0)", script, servers=3, replicas=1)
    for server, one in enumerate(kept):
        index = (server - 1) % 3  # the shard of the server before it
        assert sorted(one.weights) == sorted({(0, server), (0, index)})
        original = kept[index]
        assert torch.equal(one.weights[0, index], original.weights[0, index])
        assert one.versions[0, index] == original.versions[0, index] > 30


def whole(session, journal):
    """An optimizer that needs whole parameters; other optimizers would allow to split them."""
    torch.manual_seed(3 + 100 * session.rank)
    model = nn.Sequential(nn.Linear(8, 96), nn.Tanh(), nn.Linear(96, 256), nn.Tanh(), nn.Linear(256, 3))
    model.double()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.02)
    return train(session, journal, model, optimizer, loader_of(examples()))


def test_optimizer_that_needs_whole_parameters_trains_like_one_process(warm_pool, tmp_path):
    check(warm_pool, tmp_path, "backup(0)", whole, servers=3)
