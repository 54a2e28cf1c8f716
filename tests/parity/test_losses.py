"""Losses other than a plain mean over the batch, several losses, and several models."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from plain import examples, in_session, network, seed_weights


def work(name, options, *args):
    return in_session(globals()[name], options, *args)


def several_backward_passes(session, journal):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            out = model(x)
            loss = F.cross_entropy(out, y)
            loss.backward(retain_graph=True)
            out.square().mean().backward()
            (1e-3 * model[0].weight.square().sum()).backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def summed(session, journal):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
    model, optimizer = session.prepare(model, optimizer, loss="sum")
    loader = session.prepare(DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            journal.note_sum(loss)
    return model


def summed_piecewise(session, journal):
    """Summed losses whose gradients are added to reduced and to accumulated gradients."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)
    loader = DataLoader(examples(), batch_size=6)
    model, optimizer, loader = session.prepare(model, optimizer, loader, loss="sum")
    for _ in session.epochs(10):
        for index, (x, y) in enumerate(loader):
            with session.accumulate(index % 3 == 1):
                loss = F.cross_entropy(model(x), y, reduction="sum")
                loss.backward()
            journal.note_sum(loss)
            if index % 3 == 2:
                penalty = model[0].weight.square().sum() / session.world_size
                penalty.backward()
                optimizer.step()
                optimizer.zero_grad()
    return model


def sequences():
    """Targets that are mostly ignored; every sample has at least one valid target."""
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(52, 8, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 3, (52, 4), generator=draw)
    ignored = torch.rand(52, 4, generator=draw) < torch.linspace(0, 0.95, 52)[:, None]
    ignored[:, 0] = False
    return TensorDataset(x, y.masked_fill(ignored, -100))


def weighed(session, journal, pieces):
    seed_weights(session)
    model = nn.Sequential(nn.Linear(8, 12), nn.Unflatten(1, (3, 4))).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(sequences(), batch_size=12))
    step = 0
    for _ in session.epochs(7):
        for x, y in loader:
            step += 1
            with session.accumulate(step % pieces != 0):
                loss = F.cross_entropy(model(x), y, ignore_index=-100)
                count = int((y != -100).sum())
                session.weigh(count)
                loss.backward()
            if step % pieces == 0:
                optimizer.step()
                optimizer.zero_grad()
            journal.note(loss, count)
    return model


def adversaries(session, journal):
    """Two models with an optimizer each; one learns through the other."""
    seed_weights(session)
    maker = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    judge = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1)).double()
    makes = torch.optim.AdamW(maker.parameters(), lr=0.01)
    judges = torch.optim.SGD(judge.parameters(), lr=0.1, momentum=0.5)
    loader = DataLoader(examples(), batch_size=12)
    maker, judge, makes, judges, loader = session.prepare(maker, judge, makes, judges, loader)
    for _ in session.epochs(4):
        for x, _ in loader:
            real, noise = x[:, :4], x[:, 4:]
            fake = maker(noise)
            judges.zero_grad()
            judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            judged.backward()
            judges.step()
            makes.zero_grad()
            made = F.softplus(-judge(fake)).mean()
            made.backward()
            makes.step()
            journal.note(judged, len(x))
            journal.note(made, len(x))
    return maker, judge


def one_loss_of_two_models(session, journal):
    """One backward pass gives gradients to both, and one optimizer has all parameters."""
    encoder, decoder = network(session), nn.Linear(3, 8).double()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.2, momentum=0.9)
    loader = DataLoader(examples(), batch_size=12)
    decoder, optimizer, loader, encoder = session.prepare(decoder, optimizer, loader, encoder)
    for _ in session.epochs(7):
        for x, _ in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(decoder(encoder(x)), x)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return encoder, decoder


def test_several_backward_passes_in_one_step_add_up(parity):
    parity(work, several_backward_passes)


def test_a_summed_loss_is_summed_over_all_workers(parity):
    parity(work, summed)


def test_gradients_of_summed_losses_are_added_to_existing_gradients(parity):
    parity(work, summed_piecewise)


def test_mean_over_valid_targets_weights_workers_by_their_valid_targets(parity_of_all):
    parity_of_all(work, weighed, 1)


def test_a_mean_over_valid_targets_can_be_accumulated(parity):
    parity(work, weighed, 3)


def test_two_models_with_separate_optimizers_train_against_each_other(parity):
    parity(work, adversaries)


def test_two_models_learn_from_one_loss(parity):
    parity(work, one_loss_of_two_models)
