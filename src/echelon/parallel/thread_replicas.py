"""Replicas of a model in the threads of one process: each computes a part of the batch.

Replicas share the weights' memory and have gradients of their own, which are summed when all threads are
done: the gradients of the whole batch, to float rounding. What a model computes over its whole batch, as
batch normalisation does, would differ, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from echelon.errors import ModelError

LossFn = Callable[[Tensor, Tensor], Tensor]


class ThreadReplicas:
    """`count` replicas of a model, `model` among them; each thread computes with `threads` of torch's."""

    def __init__(self, model: nn.Module, count: int, threads: int = 1) -> None:
        if any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules()):
            raise ModelError(
                "batch normalisation sees one part of the batch in each thread",
                where="replicas in threads",
                fix="use processes, whose statistics span all samples",
            )
        self._models = [model, *(_sharing(model) for _ in range(count - 1))]
        self._pool = ThreadPoolExecutor(
            count, "replica", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def backward(self, x: Tensor, y: Tensor, loss_fn: LossFn) -> float:
        """Compute a batch; the model's parameters have its gradients then. Returns the mean loss."""
        rows = len(x)
        ends = [(at + 1) * rows // len(self._models) for at in range(len(self._models))]
        edges = list(zip([0, *ends[:-1]], ends, strict=True))

        def part(at: int) -> float:
            begin, end = edges[at]
            if begin == end:
                return 0.0
            loss = loss_fn(self._models[at](x[begin:end]), y[begin:end]) * ((end - begin) / rows)
            loss.backward()
            return float(loss.detach())

        losses = list(self._pool.map(part, range(len(self._models))))
        for own, *others in zip(*(one.parameters() for one in self._models), strict=True):
            for other in others:
                if other.grad is not None:
                    own.grad = other.grad if own.grad is None else own.grad.add_(other.grad)
                    other.grad = None
        return sum(losses)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _sharing(model: nn.Module) -> nn.Module:
    """A replica whose parameters and buffers are the model's memory."""
    kept = {id(one): one.detach() for one in (*model.parameters(), *model.buffers())}
    memo = {
        key: nn.Parameter(one, requires_grad=own.requires_grad) if isinstance(own, nn.Parameter) else one
        for own in (*model.parameters(), *model.buffers())
        for key, one in [(id(own), kept[id(own)])]
    }
    return copy.deepcopy(model, memo)
