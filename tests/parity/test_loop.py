"""Common training loops give the results of plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from plain import examples, in_session, network


def work(name, options, *args):
    return in_session(globals()[name], options, *args)


def momentum(session, journal, dtype=torch.float64):
    model = network(session, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    loader = DataLoader(examples(dtype=dtype), batch_size=12)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def adamw(session, journal):
    model = network(session)
    loader = DataLoader(examples(), batch_size=12)
    loader, model = session.prepare(loader, model)
    optimizer = session.prepare(torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))
    for _ in session.epochs(7):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            journal.note(loss, len(x))
    return model


def clipped(session, journal):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            journal.note_figure(nn.utils.clip_grad_norm_(model.parameters(), 0.2))
            optimizer.step()
            journal.note(loss, len(x))
    assert min(journal.figures) < 0.2 < max(journal.figures), "some gradients are clipped, some are not"
    return model


def accumulated(session, journal):
    """Nine micro-batches in three steps; the last is smaller and is split differently."""
    model = network(session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=6))
    pieces = 3
    for _ in session.epochs(10):
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


def accumulated_on_top(session, journal):
    """Reduced gradients are kept when local gradients are added to them."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=6))
    for _ in session.epochs(10):
        for index, (x, y) in enumerate(loader):
            with session.accumulate(index % 3 == 1):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            journal.note(loss, len(x))
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    return model


def scheduled_by_step(session, journal):
    model = network(session)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(examples(), batch_size=12)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=7 * len(loader))
    scheduler, model, loader, optimizer = session.prepare(scheduler, model, loader, optimizer)
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            journal.note(loss, len(x))
            journal.note_figure(scheduler.get_last_lr()[0])
    return model


def scheduled_by_epoch(session, journal):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    scheduler = session.prepare(torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
        scheduler.step()
        journal.note_figure(optimizer.param_groups[0]["lr"])
    return model


def scaled(session, journal):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10)
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            journal.note_figure(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            journal.note(loss, len(x))
    return model


def autocast(session, journal):
    model = network(session, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(examples(dtype=torch.float32), batch_size=12)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def recomputed(session, journal, reentrant):
    """Activation checkpointing runs a backward pass inside the backward pass."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
            loss = F.cross_entropy(model[2](hidden), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def one_batch_many_steps(session, journal):
    """Several steps on each batch, as in truncated backpropagation through time."""
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=12))
    for _ in session.epochs(3):
        for x, y in loader:
            for _ in range(3):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                journal.note(loss, len(x))
    return model


def test_sgd_with_momentum_takes_the_same_steps(parity_of_all):
    parity_of_all(work, momentum)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 2e-4), (torch.bfloat16, 0.15)], ids=["float32", "bfloat16"]
)
def test_low_precision_training_takes_the_same_steps_within_its_precision(parity, dtype, rtol):
    parity(work, momentum, dtype, rtol=rtol)


def test_adamw_takes_the_same_steps(parity_of_all):
    parity_of_all(work, adamw)


def test_clipping_between_backward_and_step_sees_the_global_norm(parity_of_all):
    parity_of_all(work, clipped)


def test_micro_batches_of_different_sizes_add_up_to_the_same_step(parity_of_all):
    parity_of_all(work, accumulated)


def test_local_gradients_can_be_added_to_reduced_gradients(parity):
    parity(work, accumulated_on_top)


def test_learning_rate_schedule_by_step_is_the_same(parity):
    parity(work, scheduled_by_step)


def test_learning_rate_schedule_by_epoch_is_the_same(parity):
    parity(work, scheduled_by_epoch)


def test_a_gradient_scaler_unscales_the_same_gradients(parity):
    parity(work, scaled)


def test_autocast_trains_the_same_within_its_precision(parity):
    parity(work, autocast, rtol=0.05)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(parity, reentrant):
    parity(work, recomputed, reentrant)


def test_several_steps_on_one_batch_are_the_same_steps(parity):
    parity(work, one_batch_many_steps)
