"""Parameters that are fetched for the next module while one computes: when, how many, and what is left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.comm.alone import SoloGroup
from echelon.comm.future import CallerFuture, Future
from echelon.comm.group import Group
from echelon.parallel.gathered import GatheredParameters
from echelon.parallel.shards import ShardedModel

LAYERS, WIDTH = 5, 8


class Told(SoloGroup):
    """Tells when gathers begin and when they are waited for; parameters are told apart by their length."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.most = self.under_way = 0

    def all_gather_unequal(
        self, buffer: Tensor, lengths: Sequence[int], *, priority: int = 0
    ) -> Future[Tensor]:
        self.events.append(("begins", sum(lengths)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)

        def landed(_: float | None) -> Tensor:
            self.under_way -= 1
            self.events.append(("landed", sum(lengths)))
            return buffer

        return CallerFuture(landed, lambda: False)

    def fork(self) -> Group:
        return self


class Observer:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class Layer(nn.Module):
    def __init__(self, at: int, told: Told) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH + at, WIDTH))  # a length of its own
        self.at, self.told = at, told

    def forward(self, x: Tensor) -> Tensor:
        self.told.events.append(("computes", self.weight.numel()))
        return torch.tanh(x @ self.weight.t())[:, :WIDTH]


class Layers(nn.Module):
    def __init__(self, told: Told, *, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(at, told) for at in range(LAYERS)])
        self.again = again
        self.until = LAYERS

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: self.until]:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def divided(*, again: bool = False) -> tuple[Layers, Told]:
    torch.manual_seed(0)
    told = Told()
    model = Layers(told, again=again)
    shards = ShardedModel(
        model,
        told,
        None,
        level=3,
        weights=[1.0],
        weight=lambda: 1.0,
        keeps=lambda: False,
        observer=Observer(),
    )
    GatheredParameters(model, shards)
    return model, told


def whole(model: nn.Module) -> list[str]:
    """The parameters that have memory for all their values, beside their slices."""
    return [name for name, p in model.named_parameters() if p.dim() > 1]


X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
LENGTHS = [(WIDTH + at) * WIDTH for at in range(LAYERS)]


def test_the_next_modules_parameters_are_under_way_while_one_computes():
    model, told = divided()
    model(X)
    told.events.clear()
    model(X)
    for now, following in pairwise(LENGTHS):
        assert told.events.index(("begins", following)) < told.events.index(("computes", now))
    assert told.most <= 3, "two for modules that come, and one that a module waits for"
    assert not told.under_way
    assert not whole(model)


def test_the_backward_pass_fetches_the_module_before():
    model, told = divided()
    model(X).sum().backward()
    output = model(X)
    told.events.clear()
    output.sum().backward()
    begun = [length for what, length in told.events if what == "begins" and length in LENGTHS]
    landed = [length for what, length in told.events if what == "landed"]
    assert begun[:LAYERS] == LENGTHS[::-1]
    for now, before in zip(LENGTHS[::-1], LENGTHS[::-1][2:], strict=False):
        assert told.events.index(("begins", before)) > told.events.index(("landed", now))
    assert len(landed) >= LAYERS
    assert not told.under_way


@pytest.mark.parametrize("until", [1, 3])
def test_what_was_fetched_for_modules_that_do_not_come_is_given_back(until):
    model, told = divided()
    model(X)
    model.until = until
    model(X).sum().backward()
    assert not told.under_way
    assert not whole(model)
    model.until = LAYERS
    model(X).sum().backward()
    assert not told.under_way


def test_an_error_in_a_forward_pass_leaves_nothing_for_the_next():
    model, told = divided()
    model(X)
    with pytest.raises(RuntimeError):
        model(X[:, :3])
    model(X).sum().backward()
    assert not told.under_way
    assert not whole(model)


def test_modules_that_are_computed_again_keep_their_parameters_for_the_backward_pass():
    gradients = []
    for again in (False, True):
        model, told = divided(again=again)
        for _ in range(2):
            for p in model.parameters():
                p.grad = None
            model(X).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert not told.under_way
    assert len(gradients[0]) == len(gradients[1]) == LAYERS
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
