"""Global batch normalisation equals that of one process; local statistics differ by worker."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

from plain import CLUSTERS, examples, in_session, plainly, seed_weights

KINDS = ("2d", "3d", "sequences", "average", "no-affine", "no-statistics")


def work(name, options, *args):
    return in_session(globals()[name], options, *args)


def convolutional(kind):
    """Features to classes, by way of the kind of layer that is asked for."""
    layers = {
        "1d": [nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=0.3)],
        "sequences": [nn.Unflatten(1, (2, 4)), nn.BatchNorm1d(2), nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)],
        "2d": [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 2, padding=1), nn.BatchNorm2d(3)],
        "3d": [nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)],
        "average": [nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=None)],
        "no-affine": [nn.Linear(8, 6), nn.BatchNorm1d(6, affine=False)],
        "no-statistics": [nn.Linear(8, 6), nn.BatchNorm1d(6, track_running_stats=False)],
    }[kind]
    with torch.no_grad():
        width = nn.Sequential(*layers, nn.Flatten()).eval()(torch.zeros(2, 8)).shape[1]
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3)).double()


def normalised(session, journal, kind, rule="global"):
    seed_weights(session)
    model = convolutional(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader, held_out = DataLoader(examples(), batch_size=12), DataLoader(examples(24), batch_size=24)
    keys = list(model.state_dict())
    model, optimizer, loader = session.prepare(model, optimizer, loader, batchnorm=rule)
    assert list(model.state_dict()) == keys
    for _ in session.epochs(7):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
        model.eval()
        if rule == "global" and kind != "no-statistics":
            with torch.no_grad():
                journal.note_figure(
                    F.cross_entropy(model(held_out.dataset.tensors[0]), held_out.dataset.tensors[1])
                )
    return model


def accumulated(session, journal):
    """Each micro-batch is normalised separately, with or without a reduction after it."""
    seed_weights(session)
    model = convolutional("1d")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, DataLoader(examples(), batch_size=6))
    for _ in session.epochs(10):
        for index, (x, y) in enumerate(loader):
            last = index % 3 == 2
            with session.accumulate(not last):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            journal.note(loss, len(x))
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return model


def summed(session, journal):
    seed_weights(session)
    model = convolutional("1d")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(examples(), batch_size=12)
    model, optimizer, loader = session.prepare(model, optimizer, loader, loss="sum")
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            journal.note_sum(loss)
    return model


def narrow(session, journal):
    """Half-precision input into a layer that keeps its own parameters in float32."""
    seed_weights(session)
    model = nn.Sequential(nn.Linear(8, 6).bfloat16(), nn.BatchNorm1d(6), nn.Linear(6, 3).bfloat16())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(examples(dtype=torch.bfloat16), batch_size=12)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(7):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def test_running_statistics_and_gradients_equal_those_of_one_process(parity_of_all):
    parity_of_all(work, normalised, "1d")


@pytest.mark.parametrize("kind", KINDS)
def test_every_batchnorm_layer_normalises_over_the_global_batch(parity, kind):
    parity(work, normalised, kind)


def test_accumulated_micro_batches_are_normalised_globally(parity):
    parity(work, accumulated)


def test_summed_loss_trains_the_same_with_global_statistics(parity):
    parity(work, summed)


def test_half_precision_passes_through_a_float32_layer(parity):
    parity(work, narrow, rtol=0.1)


def test_local_statistics_differ_but_all_workers_end_with_the_leaders(warm_pool):
    workers, options = CLUSTERS["two-unequal"]
    local = warm_pool.run(workers, work, "normalised", options, "2d", "local")
    for trained in local:
        for name, value in trained.state.items():
            assert torch.equal(value, local[0].state[name]), name
    reference = plainly(normalised, "2d")
    assert not torch.allclose(torch.tensor(local[0].losses), torch.tensor(reference.losses), rtol=1e-3)
    assert local[0].losses[-1] < local[0].losses[0], "it learns all the same"
