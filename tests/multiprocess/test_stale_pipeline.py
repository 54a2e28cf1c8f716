"""A pipeline that is not emptied between steps trains by the delayed gradients that it promises."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import echelon

CLOSE = 1e-12
Found = tuple[list[float], dict[str, Tensor]]


class Tied(nn.Module):
    """A recurrent layer, which keeps lists of its weights, a weight that is used twice, and its own one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.recurrent = nn.GRU(5, 5, batch_first=True)
        self.middle = nn.Linear(5, 5)
        self.drop = nn.Dropout(0.3)
        self.scale = nn.Parameter(torch.ones(5))
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.first(x)))
        h = self.recurrent(h.unsqueeze(1))[0].squeeze(1)
        h = self.middle(torch.tanh(self.middle(h * self.scale)))
        return self.last(self.drop(h))


def job() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Tensor, Tensor]:
    torch.manual_seed(1)
    model = Tied().double()
    x = torch.randn(44, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    y = torch.arange(44) % 3
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(4)
    return model, optimizer, DataLoader(TensorDataset(x, y), batch_size=10, shuffle=True), x, y


def by_rule(delay: int) -> Found:
    """One process: backward() hands over the gradients of `delay` calls earlier, an epoch begins anew."""
    session = echelon.join(record=False)
    model, optimizer, loader, x, y = job()
    loader = session.prepare(loader)
    losses = []
    for _ in range(2):
        late: deque[tuple[Tensor, ...]] = deque()
        for index, (a, b) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(a), b)
            losses.append(float(loss.detach()))
            late.append(torch.autograd.grad(loss / 2, list(model.parameters())))
            if len(late) > delay:
                for p, gradient in zip(model.parameters(), late.popleft(), strict=True):
                    p.grad = gradient if p.grad is None else p.grad + gradient
            if index != 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(x), y)))
        model.train()
    session.close()
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def in_stages(layout: str) -> Found:
    """The same in an unchanged loop."""
    session = echelon.join(record=False)
    model, optimizer, loader, x, y = job()
    model, optimizer, loader = session.prepare(model, optimizer, loader, parallel=layout)
    losses = []
    for _ in session.epochs(2):
        for index, (a, b) in enumerate(loader):
            with session.accumulate(index == 2):
                loss = nn.functional.cross_entropy(model(a), b)
                (loss / 2).backward()
            told = session.all_reduce(loss.detach().reshape(1), op="mean", weight=float(len(a)))
            losses.append(float(told))
            if index != 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model(x), y)))
        model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    return losses, state


@pytest.mark.parametrize(
    ("layout", "workers", "delay"),
    [
        ("pipeline(stages=2, schedule=stale, micro=3)", 2, 1),
        ("pipeline(stages=4, schedule=stale, delay=3, micro=2)", 4, 3),
    ],
)
def test_losses_and_weights_are_those_of_gradients_that_are_so_many_batches_late(
    warm_pool, layout, workers, delay
):
    ((losses, weights),) = warm_pool.run(1, by_rule, delay)
    for found, state in warm_pool.run(workers, in_stages, layout, timeout_s=60):
        assert max(abs(one - other) for one, other in zip(found, losses, strict=True)) < CLOSE
        for name, value in weights.items():
            assert torch.allclose(state[name], value, rtol=0, atol=CLOSE), name


def steps(folder: str, first: int, last: int, load: bool, workers: int) -> Found:
    """Steps of a loop without a loader, with a checkpoint after the third one."""
    session = echelon.join(record=False, shares="equal")
    model, optimizer, _, x, y = job()
    model.eval()  # no masks
    layout = "pipeline(stages=2, schedule=stale, micro=2) * data"
    model, optimizer = session.prepare(model, optimizer, parallel=layout)
    if load:
        session.load(folder)
    own = slice(session.rank // 2, None, workers // 2)  # a replica's samples
    losses = []
    for step in range(first, last):
        loss = nn.functional.cross_entropy(model(x[step::6][own]), y[step::6][own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step == 2 and not load:
            session.save(folder)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    session.close()
    return losses, state


def test_a_run_goes_on_after_a_checkpoint_as_one_that_is_resumed_from_it(warm_pool, tmp_path):
    whole = warm_pool.run(4, steps, str(tmp_path), 0, 6, False, 4, timeout_s=60)
    resumed = warm_pool.run(4, steps, str(tmp_path), 3, 6, True, 4, timeout_s=60)
    for (losses, state), (later, loaded) in zip(whole, resumed, strict=True):
        assert losses[3:] == later
        assert all(torch.equal(state[name], loaded[name]) for name in state)
        assert len(set(losses)) == 6
