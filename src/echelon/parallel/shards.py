"""One model whose optimizer states, gradients or parameters are divided among workers.

Each worker updates a slice of every trained parameter. Between the end of a backward pass and the end of
the optimizer's step a parameter *is* this worker's slice of it, and its gradient the slice's gradient,
summed over the workers: so any optimizer that computes each element by itself makes its states for the
slice alone.

    level 1  gradients stay whole until the backward pass ends; then they are summed, slice by slice
    level 2  they are summed and freed in buckets while the backward pass goes on
    level 3  parameters are slices all the time, but while a module computes with them (`gathered.py`)

Bytes: a reduce-scatter and a gather, as an all-reduce has; level 3 gathers once more, in the backward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils import _pytree as pytree

from echelon.comm.group import Group
from echelon.parallel.slice_sums import SliceSums, SumsUnderWay, packed
from echelon.parallel.slices import slices
from echelon.parallel.value_gather import ValueGather

_MOST_FLIGHTS = 2  # buckets at once: each has memory of its own


@dataclass(slots=True, eq=False)
class ShardedParameter:
    """A trained parameter, its whole values, and the slices of all workers.

    `whole` has the values; with level 3 it has memory only while they are gathered. `kept` is the gradient
    of this worker's slice from backward passes before this one.
    """

    parameter: nn.Parameter
    whole: Tensor
    shape: torch.Size
    edges: list[tuple[int, int]]
    mine: Tensor
    kept: Tensor | None = None
    cut: bool = False  # the parameter is the slice now

    @property
    def length(self) -> int:
        """How many elements the whole parameter has."""
        return self.shape.numel()

    def show_whole(self) -> None:
        """The parameter has all its values. Its gradient stays that of the slice."""
        if self.cut:
            self.parameter.data = self.whole.view(self.shape)
            self.cut = False

    def show_slice(self) -> None:
        """The parameter is this worker's slice."""
        if not self.cut:
            self.parameter.data = self.mine
            self.cut = True


@dataclass(slots=True, eq=False)
class _GradientBucket:
    """Parameters whose gradients are summed together."""

    members: list[ShardedParameter]
    waits_for: set[int] = field(default_factory=set)


class ShardedModel:
    """The shards of one model on one worker.

    group     the workers that divide the states; `weights` are their parts
    across    the workers with the same slices, if there are several sets
    weight    of this worker's loss, when a backward pass ends
    keeps     whether more backward passes follow before a step (accumulation): level 1 keeps their
              gradients on this worker, the others sum them at once
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        across: Group | None,
        *,
        level: int,
        weights: Sequence[float],
        weight: Callable[[], float],
        keeps: Callable[[], bool],
        observer: Any,
    ) -> None:
        self._model = model
        self._sums = SliceSums(group.fork(), across)
        self.values = ValueGather(group.fork(), self._gathers_bytes)
        self._level = level
        self._weight = weight
        self._keeps = keeps
        self._observer = observer
        self.rank = group.rank
        self.parameters = [
            sharded_parameter(p, weights, group.rank, apart=level == 3)
            for p in model.parameters()
            if p.requires_grad
        ]
        self._of = {id(one.parameter): one for one in self.parameters}
        self._buckets = [_GradientBucket(members) for members in packed(self.parameters[::-1])]
        self._bucket_of = {id(one): bucket for bucket in self._buckets for one in bucket.members}
        self._sent = 0  # buckets of this backward pass that have left
        self._flights: list[SumsUnderWay] = []
        self._backward = False
        self.backward_ends: Callable[[], None] = lambda: None
        self.unreduced = False
        self._handles: list[Any] = [
            one.parameter.register_post_accumulate_grad_hook(self._accumulated) for one in self.parameters
        ]
        self._handles.append(model.register_forward_hook(lambda _m, _a, out: self._watch(out)))
        if level < 3:
            self._handles.append(model.register_forward_pre_hook(lambda *_: self.show_whole()))
            self._handles.append(model.register_state_dict_pre_hook(lambda *_: self.show_whole()))
            self._handles.append(model.register_load_state_dict_pre_hook(lambda *_: self.show_whole()))

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is under way."""
        return self._backward

    def of(self, parameter: Tensor) -> ShardedParameter | None:
        """The shards of a parameter, if it is one of these."""
        return self._of.get(id(parameter))

    def show_whole(self) -> None:
        """All parameters have all their values."""
        for one in self.parameters:
            one.show_whole()

    def _watch(self, output: Any) -> None:
        """Prepare for the backward pass when a gradient reaches the model's output."""
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(lambda _grad: self._begin_backward())

    # Gradients -------------------------------------------------------------------------------------

    def _accumulated(self, parameter: Tensor) -> None:
        """A gradient is complete in this backward pass."""
        self._begin_backward()
        one = self._of[id(parameter)]
        if self._level == 1:
            return
        bucket = self._bucket_of[id(one)]
        bucket.waits_for.discard(id(one))
        while self._sent < len(self._buckets) and not self._buckets[self._sent].waits_for:
            self._send()

    def _begin_backward(self) -> None:
        if self._backward:
            return
        self._backward, self._sent = True, 0
        for one in self.parameters:
            if self._level < 3:
                one.show_whole()
            if not (self._level == 1 and self.unreduced):  # then it is whole, and not yet summed
                one.kept, one.parameter.grad = _sum(one.kept, one.parameter.grad), None
        for bucket in self._buckets:
            bucket.waits_for = {id(one) for one in bucket.members}
        Variable._execution_engine.queue_callback(self._end_backward)

    def _send(self) -> None:
        """Sum the next bucket: blocks by worker, each with its slices and which gradients there are."""
        bucket = self._buckets[self._sent]
        self._sent += 1
        gradients = [one.parameter.grad for one in bucket.members]
        self._flights.append(self._sums.begin(bucket.members, gradients, self._weight()))
        for one in bucket.members:
            one.parameter.grad = None
        while len(self._flights) > _MOST_FLIGHTS:
            self._sums.land(self._flights.pop(0))

    def _end_backward(self) -> None:
        """The backward pass is over on this worker: receive the sums, and show slices."""
        self._backward = False
        self.backward_ends()
        self._observer.computing()
        if self._level == 1 and self._keeps():
            self.unreduced = True
            return
        while self._sent < len(self._buckets):
            self._send()
        self._observer.arrived()
        while self._flights:
            self._sums.land(self._flights.pop(0))
        self.unreduced = self._keeps()
        if not self.unreduced:
            for one in self.parameters:
                one.show_slice()
                one.parameter.grad, one.kept = one.kept, None
            self.unreduced = False
        sent_bytes, self._sums.sent_bytes = (
            self._sums.sent_bytes,
            0,
        )  # with the gathers since the last round
        self._observer.reduced(sent_bytes)

    def rescale(self, factor: float) -> None:
        """The weight of gradients that level 1 keeps on this worker has changed."""
        if self._level == 1 and self.unreduced:
            for one in self.parameters:
                if one.parameter.grad is not None:
                    one.parameter.grad.mul_(factor)

    def slice_gradients(self) -> list[Tensor]:
        """The gradients of this worker's slices."""
        return [one.parameter.grad for one in self.parameters if one.parameter.grad is not None]

    # Values ----------------------------------------------------------------------------------------

    def stepped(self, updated: Sequence[Tensor]) -> None:
        """An optimizer has updated these parameters' slices: all workers get all values again."""
        if self._level == 3:
            return
        ours = [self._of[id(p)] for p in updated if id(p) in self._of]
        ours = [one for one in ours if one.cut]
        self.gather(ours)
        for one in ours:
            one.show_whole()

    def gather(self, wanted: Sequence[ShardedParameter]) -> None:
        """Fill the whole values of these parameters from all workers' slices."""
        for flight in self.values.begin(wanted):
            self.values.land(flight)

    def _gathers_bytes(self, size_bytes: int) -> None:
        self._sums.sent_bytes += size_bytes

    def close(self) -> None:
        """Give the module back, whole."""
        for handle in self._handles:
            handle.remove()
        if self._level < 3:
            self.show_whole()


def sharded_parameter(
    p: nn.Parameter, weights: Sequence[float], rank: int, *, apart: bool
) -> ShardedParameter:
    """A parameter's slices. Its memory becomes our own; with `apart` the slice has memory of its own."""
    whole = p.data.contiguous().view(-1)
    if apart:
        whole = whole.clone()  # memory that can be given back and taken again
    edges = slices(p.numel(), weights)
    mine = whole[edges[rank][0] : edges[rank][1]]
    p.data = whole.view(p.shape)
    return ShardedParameter(p, whole, p.shape, edges, mine.clone() if apart else mine)


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
