"""A backward pass in two parts has the gradients of one, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.parallel.split import HookWatch, SplitBackward

NONE, SOME, ALL = "none", "some", "all"


class Shared(nn.Module):
    """A layer that is used twice, a parameter of its own, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.once = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.twice(x) * self.scale)
        return self.once(hidden) + self.twice(hidden), x, hidden.sum()


class Square(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        Square.runs += 1
        x, weight = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.full((6,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return Square.apply(self.layer(x), self.weight)  # type: ignore[no-any-return, no-untyped-call]


MODELS = {
    "layers": (nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Tanh()), ALL),
    "normalised": (nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU()), ALL),
    "attention": (nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True), ALL),
    "weight norm": (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))), ALL),
    "shared": (Shared(), SOME),
    "written in Python": (Custom(), NONE),
    "no parameters": (nn.Sequential(nn.Tanh()), NONE),
}


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = model(x)
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("is_first_stage", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_two_parts_have_the_gradients_of_one_pass(name, is_first_stage):
    model, put_off = MODELS[name]
    weights = list(model.parameters())
    x = torch.randn(3, 4, 6).requires_grad_(not is_first_stage)
    inputs = [] if is_first_stage else [x]
    if is_first_stage and not weights:
        return  # nothing to compute
    Square.runs = 0
    roots = [one for one in outputs(model, x) if one.requires_grad]
    given = [torch.randn_like(one) for one in roots]
    whole = torch.autograd.grad(roots, [*inputs, *weights], given, allow_unused=True)
    roots = [one for one in outputs(model, x) if one.requires_grad]
    split = SplitBackward(roots, given, inputs, weights, splits=True)
    of_inputs, at_once = split.first()
    assert split.has_more == (put_off != NONE or is_first_stage)
    later = split.second()
    assert all(one is None or other is None for one, other in zip(at_once, later, strict=True))
    found = [*of_inputs, *(b if a is None else a for a, b in zip(at_once, later, strict=True))]
    for one, other in zip(found, whole, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    if not is_first_stage:
        counts = {NONE: 0, SOME: 3, ALL: len(weights)}  # of `shared`: the layer used once, and the scale
        assert sum(one is not None for one in later) == counts[put_off]
    if name == "written in Python":
        assert Square.runs == 2  # once in each way


def test_the_graph_is_free_when_both_parts_are_done():
    kept = []

    class Held:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor.detach()  # an output that is saved would refer to its own graph

        def __del__(self) -> None:
            kept.remove(id(self))

    def pack(tensor: Tensor) -> Held:
        held = Held(tensor)
        kept.append(id(held))
        return held

    x = torch.randn(3, 6, requires_grad=True)
    model, _ = MODELS["layers"]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        roots = outputs(model, x)
    split = SplitBackward(roots, [torch.ones(3, 6)], [x], list(model.parameters()), splits=True)
    del roots
    split.first()
    assert kept
    split.second()
    assert not kept


def test_hooks_on_activations_are_noticed():
    with HookWatch() as watch:
        hidden = nn.Linear(6, 6)(torch.randn(3, 6))
        assert not watch.hooked
        hidden.register_hook(lambda gradient: 2 * gradient)
    assert watch.hooked
