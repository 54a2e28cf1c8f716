"""Parameters that are frozen, unfrozen, shared, unused or rarely used train as in plain PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

from plain import examples, in_session, network, seed_weights


def work(name, options, *args):
    return in_session(globals()[name], options, *args)


def thawed(session, journal):
    """The first layer is frozen until epoch 3; then the last one is."""
    model = network(session)
    first, last = model[0], model[2]
    first.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for epoch in session.epochs(7):
        if epoch == 3:
            first.requires_grad_(True)
            last.requires_grad_(False)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            journal.note_figure(sum(p.grad is None for p in model.parameters()))
            optimizer.step()
            journal.note(loss, len(x))
    assert set(journal.figures) == {2.0}
    return model


class Tied(nn.Module):
    """Encodes and decodes with the same matrix."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 8, bias=False)
        self.decoder = nn.Linear(8, 8)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))


def tied(session, journal):
    seed_weights(session)
    model = Tied().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, _ in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    assert model.decoder.weight is model.encoder.weight
    return model


class WithSpare(nn.Module):
    """Has a head that no worker uses."""

    def __init__(self, body):
        super().__init__()
        self.spare = nn.Linear(16, 5).double()
        self.body = body

    def forward(self, x):
        return self.body(x)


def never_used(session, journal):
    model = WithSpare(network(session))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    before = model.spare.weight.detach().clone()
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    assert model.spare.weight.grad is None
    assert torch.equal(model.spare.weight, before), "nothing may decay what was never used"
    return model


class Expert(nn.Module):
    """Has a part for samples of one kind only, which few batches have."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.expert = nn.Linear(8, 3).double()

    def forward(self, x):
        out = self.body(x)
        chosen = x[:, 0] > 1.2
        if chosen.any():
            out = out.index_add(0, chosen.nonzero()[:, 0], self.expert(x[chosen]))
        return out


def used_by_some(session, journal):
    model = Expert(network(session))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.5)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            journal.note_figure(model.expert.weight.grad is None)
            optimizer.step()
            journal.note(loss, len(x))
    assert set(journal.figures) == {0.0, 1.0}, "some global batches use it, some do not"
    return model


class Mixed(nn.Module):
    """Two types of numbers, a scalar, an empty and a non-contiguous parameter, and odd buffers."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(8, 6).double()
        self.narrow = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.randn(3, 6).t())
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("short", torch.tensor([1, 2], dtype=torch.int16))

    def forward(self, x):
        hidden = torch.tanh(self.wide(x)).float()
        return self.narrow(hidden) * self.scale + hidden @ self.turned + self.nothing.sum()


def mixed(session, journal):
    seed_weights(session)
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def many_buckets(session, journal):
    """Large enough for buckets to be sent during the backward pass."""
    seed_weights(session)
    model = nn.Sequential(
        nn.Linear(8, 1100), nn.Tanh(), nn.Linear(1100, 1100), nn.Tanh(), nn.Linear(1100, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(examples(dtype=torch.float32), batch_size=13)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(8):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model[4]


def test_layers_can_be_frozen_and_unfrozen_between_epochs(parity):
    parity(work, thawed)


def test_a_shared_parameter_gets_the_gradients_of_all_its_uses(parity):
    parity(work, tied)


def test_a_parameter_that_no_worker_uses_has_no_gradient_and_does_not_decay(parity):
    parity(work, never_used)


def test_parameter_used_by_some_workers_gets_the_same_gradient_on_all_workers(parity_of_all):
    parity_of_all(work, used_by_some)


def test_parameters_of_any_type_and_shape_are_reduced(parity):
    parity(work, mixed, rtol=1e-4)


def test_model_with_several_buckets_trains_the_same(parity):
    parity(work, many_buckets, rtol=1e-4)
