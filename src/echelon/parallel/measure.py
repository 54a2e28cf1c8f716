"""What does each layer of a chain cost on this worker: time of a micro-batch, and memory?

Each layer runs forward and backward alone, on what the layers before it yield. Random state, buffers and
gradients are afterwards as they were.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.parallel.chain import Given, LayerChain

_FEWEST, _MOST = 2, 5  # passes through all layers; the first one also loads code
_LIMIT_S = 1.0  # after this, no pass more than the fewest begins
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
    held_bytes, passed_bytes = [], []
    rounds: list[list[float]] = []
    begun = time.perf_counter()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        while len(rounds) < _FEWEST or (len(rounds) < _MOST and time.perf_counter() - begun < _LIMIT_S):
            carried: tuple[Any, ...] = ()
            rounds.append([])
            for at in range(len(chain)):
                took_s, carried = _one(model, chain, at, given, carried, recompute)
                rounds[-1].append(took_s)
                if len(rounds) > 1:
                    continue
                held = {id(named[name]): named[name] for name in chain.holds(at, at + 1) if name in named}
                yielded = [one for one in pytree.tree_leaves(carried) if isinstance(one, Tensor)]
                held_bytes.append(float(_COPIES * sum(_bytes(one) for one in held.values())))
                passed_bytes.append(float(sum(_bytes(one) for one in yielded)))
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return LayerCosts(steady_times(rounds), held_bytes, passed_bytes)


def steady_times(rounds: Sequence[Sequence[float]]) -> list[float]:
    """What each layer takes in the long run, from several passes through all of them.

    Other programs, and a quota on the processor, stop a worker now and then, in whichever layer it is. So
    the least time of a layer says how layers compare, and the median of whole passes how fast the worker
    is. The first pass counts for the least times only.
    """
    least = [min(times) for times in zip(*rounds, strict=True)]
    total = sum(least)
    pace = median(sum(times) for times in rounds[1:]) / total if total > 0 else 1.0
    return [pace * one for one in least]


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
