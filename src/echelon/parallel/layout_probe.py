"""What do a model's layers and the exchanges between workers cost here? For the choice of a layout.

Layers run forward and backward alone, with few samples and with more, on all workers at the same time: so
workers that share cores are measured as they will run. Random state, buffers and gradients are afterwards
as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.errors import ModelError
from echelon.parallel.chain import Given, LayerChain, chain_of
from echelon.parallel.layout_cost import ExchangeCost
from echelon.parallel.measure import measure

_TIMES = 3  # the quickest counts
_LONG_S = 1.0  # a larger batch is not measured if it would take longer
_MOST_BYTES = 4 << 20
_PAIR_BYTES = 512 << 10
_TAG = (1 << 30) + 1


class WholeModel(LayerChain):
    """A model that cannot be cut, as a chain of one layer."""

    def __init__(self, model: nn.Module) -> None:
        self.names = ["the model"]
        self.closed = frozenset()
        self._model = model

    def run(self, begin: int, end: int, given: Given, carried: Sequence[Any]) -> tuple[Any, ...]:
        """A forward pass."""
        return (self._model(*given[0], **given[1]),)

    def holds(self, begin: int, end: int) -> set[str]:
        """All parameters and buffers."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name for name, _ in named}


def chain_or_whole(model: nn.Module) -> tuple[LayerChain, str]:
    """The model as a chain, and why it cannot be cut; empty if it can."""
    try:
        return chain_of(model), ""
    except ModelError as error:
        return WholeModel(model), error.message


class LayerTimes:
    """Seconds of each layer on this worker: what a pass costs, and what each sample adds; and bytes."""

    def __init__(
        self, model: nn.Module, chain: LayerChain, given_of: Callable[[int], Given], sizes: Sequence[int]
    ) -> None:
        small, large = min(sizes), max(sizes)
        first = measure(model, chain, given_of(small))
        self.sample_s = [took / small for took in first.times_s]
        self.fixed_s = [0.0] * len(chain)
        if small < large and sum(first.times_s) * large / small <= _LONG_S:
            second = measure(model, chain, given_of(large))
            pairs = list(zip(first.times_s, second.times_s, strict=True))
            self.sample_s = [max(0.0, b - a) / (large - small) for a, b in pairs]
            self.fixed_s = [
                max(0.0, a - small * each) for (a, _), each in zip(pairs, self.sample_s, strict=True)
            ]
        self.yielded_bytes = [size / small for size in first.passed_bytes]
        named = dict(model.named_parameters())
        counted: set[str] = set()
        self.trained_bytes: list[float] = []
        for at in range(len(chain)):
            held = {name for name in chain.holds(at, at + 1) if name in named} - counted
            counted |= held
            self.trained_bytes.append(
                float(sum(_bytes(named[name]) for name in held if named[name].requires_grad))
            )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def update_s(size_bytes: float, states: float) -> float:
    """About how long an update of so many bytes takes: arithmetic in memory, more with more states."""
    one, other = torch.zeros(1 << 18), torch.ones(1 << 18)
    found_s = []
    for _ in range(5):
        begun = time.perf_counter()
        one.add_(other, alpha=0.5)
        found_s.append(time.perf_counter() - begun)
    each_s = min(found_s) / _bytes(one)
    return each_s * (2 * size_bytes + 3 * states)


def measure_exchange(group: Group, size_bytes: float, shifts: Sequence[int]) -> ExchangeCost:
    """Messages to the workers that are so many ranks further, and all-reduces; all workers call it."""
    size = max(1 << 10, min(_MOST_BYTES, int(size_bytes)))
    small_s = _agreed(group, _quickest(group, partial(_reduce, group, 8)))
    large_s = _agreed(group, _quickest(group, partial(_reduce, group, size)))
    own = group.buffer(size // 4, torch.float32, torch.device("cpu"))  # where gradients are summed
    own_s = _agreed(group, _quickest(group, lambda: group.all_reduce(own).wait()))
    group.release(own)
    rows = []
    for shift in shifts:
        short_s = _quickest(group, partial(_message, group, shift, 8))
        long_s = _quickest(group, partial(_message, group, shift, _PAIR_BYTES))
        rate = _PAIR_BYTES / max(1e-9, long_s - short_s)
        rows.append([short_s, rate])
    told = group.all_gather(torch.tensor(rows, dtype=torch.float64))
    latency_s, bytes_per_s = {}, {}
    for rank, table in enumerate(told):  # the receiver measures
        for shift, (short_s, rate) in zip(shifts, table.tolist(), strict=True):
            pair = (rank - shift) % group.size, rank
            latency_s[pair], bytes_per_s[pair] = short_s, rate
    return ExchangeCost(
        latency_s=latency_s,
        bytes_per_s=bytes_per_s,
        reduce_latency_s=small_s,
        reduce_bytes_per_s=size / max(1e-9, own_s - small_s),
        slices_bytes_per_s=size / max(1e-9, large_s - small_s),
        hides=group.machines > 1,
    )


def _reduce(group: Group, size: int) -> None:
    group.all_reduce(torch.zeros(size // 4)).wait()


def _message(group: Group, shift: int, size: int) -> None:
    sent = torch.zeros(size, dtype=torch.uint8)
    out = group.send(sent, (group.rank + shift) % group.size, _TAG)
    group.receive(torch.empty_like(sent), (group.rank - shift) % group.size, _TAG).wait()
    out.wait()


def _quickest(group: Group, act: Callable[[], object]) -> float:
    found = []
    for _ in range(_TIMES):
        group.barrier()
        begun = time.perf_counter()
        act()
        found.append(time.perf_counter() - begun)
    return min(found)


def _agreed(group: Group, mine_s: float) -> float:
    """The same figure on all workers: that of the slowest."""
    return max(float(one) for one in group.all_gather(torch.tensor([mine_s], dtype=torch.float64)))
