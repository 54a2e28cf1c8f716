"""What does each layer of a chain cost on this worker: time of a micro-batch, and memory?

Each layer runs forward and backward alone, on what the layers before it yield. Random state, buffers and
gradients are afterwards as they were.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.parallel.chain import Given, LayerChain

_TIMES = 2  # the quicker counts: the first pass also loads code
_COPIES = 4  # a parameter, its gradient, and two states of an optimizer such as Adam


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """By layer: seconds of a forward and a backward pass of a micro-batch, and bytes.

    held_bytes    parameters, their gradients, and an optimizer's states
    passed_bytes  what the layer yields for a micro-batch, and keeps for its backward pass
    """

    times_s: list[float]
    held_bytes: list[float]
    passed_bytes: list[float]


def measure(model: nn.Module, chain: LayerChain, given: Given, *, recompute: bool = False) -> LayerCosts:
    """Measure every layer with one micro-batch; with `recompute` the forward pass counts twice."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    times, held_bytes, passed_bytes = [], [], []
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        carried: tuple[Any, ...] = ()
        for at in range(len(chain)):
            took_s, after = min(
                (_one(model, chain, at, given, carried, recompute) for _ in range(_TIMES)),
                key=lambda one: one[0],
            )
            held = {id(named[name]): named[name] for name in chain.holds(at, at + 1) if name in named}
            yielded = [one for one in pytree.tree_leaves(after) if isinstance(one, Tensor)]
            times.append(took_s)
            held_bytes.append(float(_COPIES * sum(_bytes(one) for one in held.values())))
            passed_bytes.append(float(sum(_bytes(one) for one in yielded)))
            carried = after
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return LayerCosts(times, held_bytes, passed_bytes)


def _one(
    model: nn.Module,
    chain: LayerChain,
    at: int,
    given: Given,
    carried: tuple[Any, ...],
    recompute: bool,
) -> tuple[float, tuple[Any, ...]]:
    leaves = [one for one in pytree.tree_leaves(carried) if isinstance(one, Tensor)]
    inputs = [one.detach().requires_grad_(one.is_floating_point()) for one in leaves]
    left = iter(inputs)
    # Clones: a layer may change its input in place, which torch refuses for a leaf.
    entering = pytree.tree_map(lambda one: next(left).clone() if isinstance(one, Tensor) else one, carried)
    begun = time.perf_counter()
    out = chain.run(at, at + 1, given, entering)
    forward_s = time.perf_counter() - begun
    roots = [one for one in pytree.tree_leaves(out) if isinstance(one, Tensor) and one.requires_grad]
    wanted = [one for one in [*inputs, *model.parameters()] if one.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(one) for one in roots], allow_unused=True)
    took_s = time.perf_counter() - begun + recompute * forward_s
    return took_s, pytree.tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, out)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
