"""Reduces a model's gradients while backward goes on, so that `backward()` returns with them reduced.

Each parameter reports when its gradient is there; a bucket whose gradients are all there, and whose
predecessors have left, leaves at once. When backward ends, what is still missing is filled in, and the
results are awaited and put in place.

The combined gradient is sum_i w_i g_i with weights that sum to one. A gradient that was reduced
before (several backward passes in one step) is the same on all workers, so reducing it again with the
new part leaves it as it is. Where a sum is wanted instead, each gradient is multiplied by the number of
workers before it is added to what is there, and the mean of those is the sum.

Each bucket carries a flag per parameter: one that no worker used keeps the gradient it had, which is
none, just as in a single process.

Reduced gradients live in the buckets, which the group places where it reduces best: nothing is copied back.
A worker's own gradients stay as they are until the whole round has succeeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.comm.buckets import Item, assign
from echelon.comm.group import Group, Pending
from echelon.errors import ModelError

NamedParameter = tuple[str, nn.Parameter]


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketTimes:
    """How one bucket's reduction went; instants are on the performance counter.

    `filled_at` when the worker began to put gradients into it, which took `encode_s`; `begun`, `sent` and
    `ended` as in `group.Timing` (0 if the group does not say); `wait_s` is how long the trainer was
    blocked for it. `how` says in what form it went.
    """

    index: int
    size_bytes: int
    sent_bytes: int
    filled_at: float
    encode_s: float
    begun: float
    sent: float
    ended: float
    adding_s: float
    wait_s: float
    how: str = "dense"


class RoundObserver(Protocol):
    """Whoever wants to know how a round went."""

    def computing(self) -> None:
        """Backward goes on: one more gradient is there."""

    def arrived(self) -> None:
        """All of this worker's gradients are there."""

    def bucket(self, times: BucketTimes) -> None:
        """One bucket has been reduced."""

    def reduced(self, sent_bytes: int) -> None:
        """All workers' gradients are there."""


class _Bucket:
    """Parameters that travel together, and the buffer they travel in: gradients, then flags."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Group) -> None:
        first = parameters[0]
        self.parameters = list(parameters)
        length = sum(p.numel() for p in parameters)
        self.buffer = group.buffer(length + len(parameters), first.dtype, first.device)
        self.flags = self.buffer[length:]
        self.views: list[Tensor] = []
        at = 0
        for p in parameters:
            self.views.append(self.buffer[at : at + p.numel()].view(p.shape))
            at += p.numel()
        self.missing = len(parameters)
        self.pending: Pending | None = None
        self.filled_at = self.encode_s = 0.0

    def fill(self, weight: float) -> None:
        self.filled_at = time.perf_counter()
        used = []
        for p, view in zip(self.parameters, self.views, strict=True):
            if p.grad is None:
                view.zero_()
            else:
                torch.mul(p.grad, weight, out=view)
            used.append(float(p.grad is not None))
        self.flags.copy_(torch.tensor(used))
        self.encode_s = time.perf_counter() - self.filled_at

    def put_back(self) -> None:
        for p, view, used in zip(self.parameters, self.views, self.flags.tolist(), strict=True):
            if used:
                p.grad = view

    def reset(self) -> None:
        self.missing = len(self.parameters)
        self.pending = None


class Reducer:
    """Keeps one model's gradients the same on all workers."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        group: Group,
        weight: Callable[[], float],
        observer: RoundObserver,
        *,
        summed: bool = False,
    ) -> None:
        self._named = list(parameters)
        self._group = group
        self._weight = weight
        self._observer = observer
        self._summed = summed
        self._handles: list[RemovableHandle] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._trainable: list[bool] = []
        self._next = 0
        self._in_backward = False
        self.active = True
        self.unreduced = False
        self.refresh()

    def refresh(self) -> None:
        """Take note of parameters that were frozen or thawed. All workers must agree on which."""
        trainable = [p.requires_grad for _, p in self._named]
        if trainable == self._trainable:
            return
        self.detach()
        self._trainable = trainable
        wanted = [p for (_, p) in self._named if p.requires_grad]
        items = [Item(size_bytes=p.numel() * p.element_size(), kind=(p.dtype, p.device)) for p in wanted]
        self._buckets = [
            _Bucket([wanted[index] for index in bucket], self._group) for bucket in assign(items)
        ]
        for bucket in self._buckets:
            for p in bucket.parameters:
                self._bucket_of[id(p)] = bucket
                self._handles.append(p.register_post_accumulate_grad_hook(self._ready))
                if self._summed:
                    self._handles.append(p.register_hook(self._times_workers))

    def detach(self) -> None:
        """Leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._bucket_of.clear()
        for bucket in self._buckets:
            self._group.release(bucket.buffer)
        self._buckets = []

    def touches(self, parameter_ids: set[int]) -> bool:
        """Whether any of these parameters is this reducer's."""
        return any(id(p) in parameter_ids for _, p in self._named)

    def rescale(self, factor: float) -> None:
        """Gradients kept locally are in units of the current weight: convert them to the next one."""
        if self._summed:
            return
        for _, p in self._named:
            if p.grad is not None:
                p.grad.mul_(factor)

    def _times_workers(self, grad: Tensor) -> Tensor:
        return grad * self._group.size

    def _ready(self, parameter: Tensor) -> None:
        self._observer.computing()
        self.unreduced = True  # until the round is over; for good, if this pass fails in the middle
        if not self.active:
            return
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise ModelError(
                f"parameter {self._name(parameter)} has a sparse gradient, which cannot be reduced yet",
                fix="build the embedding with sparse=False",
            )
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._leave(self._buckets[self._next])

    def _leave(self, bucket: _Bucket) -> None:
        self._next += 1
        if self._next == len(self._buckets):
            self._observer.arrived()
        bucket.fill(self._weight())
        bucket.pending = self._group.all_reduce(bucket.buffer, priority=-self._next)

    def _finish(self) -> None:
        """Backward is over: send what is left, wait for all, put the results in place."""
        try:
            while self._next < len(self._buckets):
                self._leave(self._buckets[self._next])
            sent_bytes = 0
            for index, bucket in enumerate(self._buckets):
                sent_bytes += self._await(index, bucket)
            for bucket in self._buckets:
                bucket.put_back()
            self._observer.reduced(sent_bytes)
            self.unreduced = False
        finally:
            self._in_backward = False
            self._next = 0
            for bucket in self._buckets:
                bucket.reset()

    def _await(self, index: int, bucket: _Bucket) -> int:
        """Wait for one bucket and report it; returns what this worker sent for it."""
        assert bucket.pending is not None
        waiting = time.perf_counter()
        bucket.pending.wait()
        wait_s = time.perf_counter() - waiting
        timing = bucket.pending.timing()
        sent_bytes = self._group.sent_bytes(bucket.buffer)
        self._observer.bucket(
            BucketTimes(
                index=index,
                size_bytes=bucket.buffer.numel() * bucket.buffer.element_size(),
                sent_bytes=sent_bytes,
                filled_at=bucket.filled_at,
                encode_s=bucket.encode_s,
                begun=timing.begun,
                sent=timing.sent,
                ended=timing.ended,
                adding_s=timing.adding_s,
                wait_s=wait_s,
            )
        )
        return sent_bytes

    def _name(self, parameter: Tensor) -> str:
        return next((name for name, p in self._named if p is parameter), "?")
