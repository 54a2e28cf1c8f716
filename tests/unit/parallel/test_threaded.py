"""Replicas in threads: gradients and dropout masks of the whole batch, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import ModelError
from echelon.parallel.threaded import ThreadedModel


class Layers(nn.Module):
    """A layer that is used twice, dropout between, a frozen parameter, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.drop = nn.Dropout(0.4)
        self.frozen = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.exit = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(torch.tanh(self.layer(x)) * self.frozen)
        h = self.drop(self.layer(h))
        return self.exit(h), h


class Noisy(nn.Module):
    """Draws random numbers that are not masks."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn(1, dtype=x.dtype)


def trained(model: nn.Module) -> list[Tensor]:
    """Losses, weights and a random number after some steps."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (7,), generator=generator)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        logits, hidden = model(x)
        loss = nn.functional.cross_entropy(logits, y) + hidden.square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    model.eval()
    with torch.no_grad():
        found.append(model(x)[0])
    return [*found, *(p.detach() for p in model.parameters()), torch.rand(1)]


@pytest.mark.parametrize("replicas", [2, 3, 9])
def test_replicas_in_threads_train_as_one_thread_does_with_the_same_masks(request, replicas):
    torch.manual_seed(0)
    model = Layers().double()
    alone = trained(copy.deepcopy(model))
    threaded = ThreadedModel(model, replicas, 1)
    request.addfinalizer(threaded.close)
    for one, other in zip(trained(model), alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert model.unused.weight.grad is None


def test_random_numbers_that_are_not_masks_are_refused(request):
    model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(), Noisy())
    threaded = ThreadedModel(model, 2, 1)
    request.addfinalizer(threaded.close)
    with pytest.raises(ModelError, match="not dropout masks"):
        model(torch.ones(4, 5))


def test_batch_normalisation_is_refused():
    with pytest.raises(ModelError, match="one part of the batch in each thread"):
        ThreadedModel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 2, 1)


def test_an_error_in_a_thread_reaches_the_script_and_nobody_waits_for_masks(request):
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if float(x[0, 0]) == 0:
                raise ValueError("the first part fails")
            return nn.functional.dropout(x)

    model = nn.Sequential(Failing())
    threaded = ThreadedModel(model, 2, 1)
    request.addfinalizer(threaded.close)
    with pytest.raises(ValueError, match="the first part fails"):
        model(torch.arange(8.0).view(4, 2))


def test_a_closed_model_computes_by_itself_again():
    model = nn.Linear(2, 2)
    own = model.forward
    ThreadedModel(model, 2, 1).close()
    assert model.forward == own
