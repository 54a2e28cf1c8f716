"""Buckets: whole gradients side by side, a linear layer's own buffer, or the factors of its gradient.

A bucket is filled with this worker's gradients, sent, and lands with the combined gradients of all workers,
sum_i w_i g_i. It knows which parameters at least one worker used: the others keep their gradient, which is
None, as in a single process.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from echelon.comm.future import Future
from echelon.comm.group import Group, blocks
from echelon.reduce.piggyback import Piggyback, Seats

Landed = list[tuple[nn.Parameter, Tensor | None]]


class Bucket(ABC):
    """Parameters whose gradients are reduced together; `how` names the form.

    A bucket with `lands_alone` false may communicate when it lands: all workers must let such buckets land
    in the same order.
    """

    how: str
    lands_alone = True
    has_sums = True  # all that lands is one tensor, which another worker could be given
    coded_bytes = 0  # the encoded part of the bytes that this worker sends

    def __init__(self, parameters: Sequence[nn.Parameter], missing: int) -> None:
        self.parameters = list(parameters)
        self.awaits = missing
        self.missing = missing
        self.future: Future[Tensor] | None = None
        self.filled_at = self.encode_s = 0.0

    def send(self, weight: float, priority: int) -> None:
        """Fill in this worker's gradients, times its weight, and start the reduction."""
        self.filled_at = time.perf_counter()
        self._fill(weight)
        self.encode_s = time.perf_counter() - self.filled_at
        self.future = self._start(priority)

    def reset(self) -> None:
        """Prepare for the next round."""
        self.missing = self.awaits
        self.future = None

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The size of its buffer."""

    @abstractmethod
    def sent_bytes(self) -> int:
        """The bytes that this worker sends."""

    @abstractmethod
    def landed(self) -> Landed:
        """After the wait: each parameter with its combined gradient, or None if no worker used it."""

    @abstractmethod
    def memory(self) -> list[Tensor]:
        """The memory of the combined gradients, by parameter."""

    def release(self) -> None:
        """Free the buffer."""
        return

    def take_back(self) -> None:
        """The round is void: it is filled again with the same gradients, perhaps as another bucket."""
        return

    def is_finite(self) -> bool:
        """Whether this worker's own gradients are."""
        return all(p.grad is None or bool(p.grad.isfinite().all()) for p in self.parameters)

    def sums(self) -> Tensor:
        """All that lands, if `has_sums`."""
        raise NotImplementedError(f"a bucket of {self.how} has no sums")

    @abstractmethod
    def _fill(self, weight: float) -> None: ...

    @abstractmethod
    def _start(self, priority: int) -> Future[Tensor]: ...


class DenseBucket(Bucket):
    """Whole gradients side by side, then one flag per parameter; summed by an all-reduce.

    Combined gradients stay in the buffer, which the group allocates where it reduces fastest. Numbers that
    travel along are behind the flags.
    """

    how = "dense"

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Group, piggyback: Piggyback | None = None
    ) -> None:
        super().__init__(parameters, len(parameters))
        first = parameters[0]
        length = sum(p.numel() for p in parameters)
        flagged = length + len(parameters)
        self._group = group.current
        self._repeats = group.changes is not None
        self._piggyback = piggyback
        self._seats = piggyback.seats() if piggyback is not None else Seats(0, 0)
        extra = piggyback.length(self._seats) if piggyback is not None else 0
        self._buffer = self._group.buffer(flagged + extra, first.dtype, first.device)
        self._flags = self._buffer[length:flagged]
        self._room = self._buffer[flagged:]
        self._views: list[Tensor] = []
        at = 0
        for p in parameters:
            self._views.append(self._buffer[at : at + p.numel()].view(p.shape))
            at += p.numel()

    @property
    def size_bytes(self) -> int:
        """Gradients and flags."""
        return self._buffer.numel() * self._buffer.element_size()

    def sent_bytes(self) -> int:
        """As the group counts."""
        return self._group.sent_bytes(self._buffer)

    def landed(self) -> Landed:
        """The buffer's views."""
        if self._piggyback is not None:
            self._piggyback.landed(self._room, self._seats)
        used = self._flags.tolist()
        return [
            (p, view if flag else None)
            for p, view, flag in zip(self.parameters, self._views, used, strict=True)
        ]

    def memory(self) -> list[Tensor]:
        """The buffer's views."""
        return self._views

    def release(self) -> None:
        """Let the group forget the buffer."""
        self._group.release(self._buffer)

    def sums(self) -> Tensor:
        """The buffer."""
        return self._buffer

    def _fill(self, weight: float) -> None:
        used = []
        for p, view in zip(self.parameters, self._views, strict=True):
            if p.grad is None:
                view.zero_()
            else:
                if self._repeats:
                    _part_from(view, p)
                torch.mul(p.grad, weight, out=view)
            used.append(float(p.grad is not None))
        self._flags.copy_(torch.tensor(used))
        if self._piggyback is not None:
            self._piggyback.fill(self._room, self._seats)

    def _start(self, priority: int) -> Future[Tensor]:
        return self._group.all_reduce(self._buffer, priority=priority)


def _part_from(view: Tensor, p: nn.Parameter) -> None:
    """Give a parameter's gradient memory of its own: it must outlive the round, which writes to `view`."""
    if p.grad is not None and p.grad.data_ptr() == view.data_ptr():
        p.grad = p.grad.clone()


class FactorSource(Protocol):
    """A linear layer that keeps its inputs and output gradients in place of its weight's gradient.

    The weight may also have a gradient: of an earlier pass, or of another use of the weight.
    """

    weight: nn.Parameter

    def take(self) -> tuple[Tensor, Tensor]:
        """The weighted output gradients and the inputs of this pass, one row each per sample."""

    def lend(self, scale: float) -> tuple[Tensor, Tensor]:
        """The same with this weight, until they are taken back or forgotten."""

    def take_back(self) -> None:
        """They are asked for again."""

    def forget(self) -> None:
        """They are needed no more."""


class LinearBucket(Bucket):
    """A linear layer's weight gradient, computed in the buffer: G^T X.

    So a large gradient is neither allocated nor copied. The last element is the flag.
    """

    how = "dense"

    def __init__(self, capture: FactorSource, group: Group) -> None:
        super().__init__([capture.weight], 1)
        self._capture = capture
        self._repeats = group.changes is not None
        self._group = group.current
        length = capture.weight.numel()
        self._buffer = self._group.buffer(length + 1, capture.weight.dtype, capture.weight.device)
        self._view = self._buffer[:length].view(capture.weight.shape)
        self._own: tuple[Tensor, Tensor] = (self._view[:0], self._view[:0])

    @property
    def size_bytes(self) -> int:
        """The gradient and its flag."""
        return self._buffer.numel() * self._buffer.element_size()

    def sent_bytes(self) -> int:
        """As the group counts."""
        return self._group.sent_bytes(self._buffer)

    def landed(self) -> Landed:
        """The buffer."""
        return [(self.parameters[0], self._view if float(self._buffer[-1]) else None)]

    def memory(self) -> list[Tensor]:
        """The buffer."""
        return [self._view]

    def release(self) -> None:
        """Let the group forget the buffer."""
        self._group.release(self._buffer)

    def reset(self) -> None:
        """Also forget the rows."""
        super().reset()
        self._capture.forget()

    def take_back(self) -> None:
        """The rows."""
        self._capture.take_back()

    def is_finite(self) -> bool:
        """Also the rows, whose product may be not finite all the same."""
        rows, inputs = self._own
        return super().is_finite() and bool(torch.mm(rows.t(), inputs).isfinite().all())

    def sums(self) -> Tensor:
        """The buffer."""
        return self._buffer

    @torch.no_grad()
    def _fill(self, weight: float) -> None:
        if self._repeats:
            _part_from(self._view, self.parameters[0])
        self._own = self._capture.lend(weight) if self._repeats else self._capture.take()
        rows, inputs = self._own
        before = self.parameters[0].grad
        if before is not None:
            torch.addmm(before, rows.t(), inputs, beta=weight, out=self._view)
        else:
            torch.mm(rows.t(), inputs, out=self._view)
        self._buffer[-1] = float(len(rows) > 0 or before is not None)

    def _start(self, priority: int) -> Future[Tensor]:
        return self._group.all_reduce(self._buffer, priority=priority)


class FactorBucket(Bucket):
    """A linear layer's weight gradient as its factors: G^T X of all workers' rows, by an all-gather.

    Each worker's block has room for as many rows as it had before: [count | G | X]. If a worker has more
    rows, all see it from its count and gather again with more room. If a worker also has a gradient, its
    count is -1, and all workers sum whole gradients this time. All workers multiply the same rows in the
    same order.
    """

    how = "factors"
    lands_alone = False
    has_sums = False

    def __init__(self, capture: FactorSource, group: Group, rows_of: Sequence[int]) -> None:
        super().__init__([capture.weight], 1)
        self._capture = capture
        self._repeats = group.changes is not None
        self._group = group.current
        self._room_of = list(rows_of)
        self._outputs, self._inputs = capture.weight.shape
        self._grad = torch.zeros_like(capture.weight, requires_grad=False)
        self._own: tuple[Tensor, Tensor] = (self._grad[:0], self._grad[:0])
        self._before: Tensor | None = None
        self._weight = 1.0
        self._buffer = self._grad[:0]
        self._make_room()

    @property
    def size_bytes(self) -> int:
        """All workers' blocks."""
        return self._buffer.numel() * self._buffer.element_size()

    def sent_bytes(self) -> int:
        """This worker's block, to every other worker."""
        block = self._lengths[self._group.rank] * self._buffer.element_size()
        return (self._group.size - 1) * block

    @torch.no_grad()
    def landed(self) -> Landed:
        """The product of all workers' rows."""
        (weight,) = self.parameters
        counts = self._counts()
        if min(counts) < 0:
            return [(weight, self._sum_whole())]
        if any(count > room for count, room in zip(counts, self._room_of, strict=True)):
            self._room_of = [max(pair) for pair in zip(counts, self._room_of, strict=True)]
            self._make_room()
            self._write_block()
            self._group.all_gather_unequal(self._buffer, self._lengths).wait()
        if not sum(counts):
            return [(weight, None)]
        parts = [self._parts(block, k) for block, k in zip(self._blocks, counts, strict=True)]
        rows = torch.cat([rows for rows, _ in parts])
        inputs = torch.cat([inputs for _, inputs in parts])
        torch.mm(rows.t(), inputs, out=self._grad)
        return [(weight, self._grad)]

    def _sum_whole(self) -> Tensor:
        """Sum whole gradients, because a worker has a gradient besides its rows."""
        rows, inputs = self._own
        if self._before is None:
            torch.mm(rows.t(), inputs, out=self._grad)
        else:
            torch.addmm(self._before, rows.t(), inputs, beta=self._weight, out=self._grad)
        self._group.all_reduce(self._grad.view(-1)).wait()
        return self._grad

    def memory(self) -> list[Tensor]:
        """A tensor of its own."""
        return [self._grad]

    def reset(self) -> None:
        """Also forget the rows."""
        super().reset()
        self._capture.forget()

    def take_back(self) -> None:
        """The rows."""
        self._capture.take_back()

    def is_finite(self) -> bool:
        """Also the rows, whose product may be not finite all the same."""
        rows, inputs = self._own
        return super().is_finite() and bool(torch.mm(rows.t(), inputs).isfinite().all())

    def _fill(self, weight: float) -> None:
        if self._repeats:
            _part_from(self._grad, self.parameters[0])
        self._own = self._capture.lend(weight) if self._repeats else self._capture.take()
        self._before = self.parameters[0].grad
        self._weight = weight
        self._write_block()

    def _start(self, priority: int) -> Future[Tensor]:
        return self._group.all_gather_unequal(self._buffer, self._lengths, priority=priority)

    def _make_room(self) -> None:
        self._lengths = [1 + room * (self._outputs + self._inputs) for room in self._room_of]
        self._buffer = self._grad.new_zeros(sum(self._lengths))
        self._blocks = blocks(self._buffer, self._lengths)

    def _write_block(self) -> None:
        rows, inputs = self._own
        block = self._blocks[self._group.rank]
        count = rows.shape[0]
        block[0] = count if self._before is None else -1
        if self._before is None and count <= self._room_of[self._group.rank]:
            mine, ours = self._parts(block, count)
            mine.copy_(rows)
            ours.copy_(inputs)

    def _parts(self, block: Tensor, count: int) -> tuple[Tensor, Tensor]:
        middle = 1 + count * self._outputs
        stop = middle + count * self._inputs
        return block[1:middle].view(count, self._outputs), block[middle:stop].view(count, self._inputs)

    def _counts(self) -> list[int]:
        return [int(block[0]) for block in self._blocks]
