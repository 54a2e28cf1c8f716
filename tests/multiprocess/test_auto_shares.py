"""Shares that follow the workers' speeds: training stays exact, and every sample is seen once."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.observe.events import SharesChanged, read_events
from echelon.plan.plan import Plan
from echelon.train import auto_shares

SAMPLES, BATCH, EPOCHS = 203, 20, 6


class Slow(nn.Module):
    """A model whose forward pass takes a time for each sample, on one worker longer."""

    def __init__(self, per_sample_s):
        super().__init__()
        self.per_sample_s = per_sample_s
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def forward(self, x):
        time.sleep(self.per_sample_s * len(x))
        return self.layers(x)


def train(shares, per_sample_s=(), loader_workers=0, ahead=False):
    """What was trained, the shares at the end, and the samples that this worker drew in each epoch."""
    auto_shares._WARM_UP_S = 0.0
    session = echelon.join(shares=shares, record=True, seed=4)
    torch.manual_seed(3)
    data = torch.randn(SAMPLES, 3, dtype=torch.float64)
    rows = TensorDataset(torch.arange(SAMPLES), data, data.sum(1, keepdim=True))
    own_s = per_sample_s[session.rank] if per_sample_s else 0.0
    model = Slow(own_s).double()
    loader = DataLoader(rows, BATCH, shuffle=True, num_workers=loader_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    seen = []
    for _ in session.epochs(EPOCHS):
        drawn = []
        batches = list(loader) if ahead else loader
        for indices, x, y in batches:
            drawn += indices.tolist()
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        seen.append(drawn)
    session.close()
    weights = torch.cat([value.flatten().double() for value in model.state_dict().values()])
    events = list(read_events(session.folder.events_of(session.rank)))
    changes = [event for event in events if isinstance(event, SharesChanged)]
    return weights, seen, changes, Plan.read(session.folder.plan).reasons["shares"]


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_slow_worker_gets_less_and_training_equals_that_of_one_process(warm_pool, loader_workers):
    alone, _, _, _ = warm_pool.run(1, train, None)[0]
    found = warm_pool.run(3, train, "auto", (0.0005, 0.0005, 0.008), loader_workers)
    for weights, _, _, why in found:
        torch.testing.assert_close(weights, alone, rtol=1e-6, atol=1e-6)
        assert "by measured speed; from step " in why
    changes = found[0][2]
    assert changes
    assert changes[0].before == [7, 7, 6]
    assert changes[-1].shares[2] < 6
    assert changes[0].slowest == 2
    assert changes[0].expected_s < changes[0].slowest_s
    for _, _, others, _ in found:
        assert [(c.step, c.shares) for c in others] == [(c.step, c.shares) for c in changes]
    for epoch in range(EPOCHS):
        assert sorted(index for _, seen, _, _ in found for index in seen[epoch]) == list(range(SAMPLES))


def test_batches_that_were_all_drawn_before_the_first_step_are_trained_as_they_are(warm_pool):
    alone, _, _, _ = warm_pool.run(1, train, None)[0]
    for weights, _, _, _ in warm_pool.run(2, train, "auto", (0.0005, 0.004), 0, True):
        torch.testing.assert_close(weights, alone, rtol=1e-6, atol=1e-6)


def test_shares_that_are_asked_for_stay(warm_pool):
    for shares in ([2, 1], "equal"):
        for _, _, changes, why in warm_pool.run(2, train, shares, (0.0005, 0.004)):
            assert changes == []
            assert "measured" not in why
