"""Shuffled data comes in the same order on any number of workers, so that training is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from plain import CLUSTERS, Trained, assert_same, examples, in_session, network


def work(name, options, *args):
    return in_session(globals()[name], options, *args)


def shuffled(session, journal, drop_last):
    model = network(session)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(examples(54), batch_size=10, shuffle=True, drop_last=drop_last)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for _ in session.epochs(8):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            journal.note(loss, len(x))
    return model


def drawn_alone(drop_last):
    """The batches that a session of one draws with the default seed, epoch by epoch."""
    with echelon.join(record=False) as session:
        numbered = TensorDataset(torch.arange(54))
        loader = session.prepare(DataLoader(numbered, batch_size=10, shuffle=True, drop_last=drop_last))
        return [batch.tolist() for _ in session.epochs(8) for (batch,) in loader]


@pytest.mark.parametrize("drop_last", [False, True], ids=["whole", "drop-last"])
@pytest.mark.parametrize("cluster", ["two-unequal", "four-equal", "four-unequal"])
def test_workers_train_on_the_shuffled_batches_of_one_process(warm_pool, cluster, drop_last):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = examples(54).tensors
    losses = []
    for batch in drawn_alone(drop_last):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    reference = Trained(losses, [], {f"0.{name}": value for name, value in model.state_dict().items()})
    workers, options = CLUSTERS[cluster]
    assert_same(reference, warm_pool.run(workers, work, "shuffled", options, drop_last), rtol=1e-9)
