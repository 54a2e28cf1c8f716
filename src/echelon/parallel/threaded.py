"""Replicas of a model in the threads of one process: each computes a part of the worker's samples.

The module stays the script's: `model(x)` runs its forward in all threads, on rows of the same inputs, with
the same parameters, and returns the whole output; backward goes back through all of them. Each thread has a
graph of its own, and the parameters' gradients are summed in the order of the parts: they are those of the
whole batch, to float rounding. Autograd then gets one gradient for each parameter, as from any operation.

Dropout masks are drawn for the whole batch, by the first part, in the order in which one thread draws them;
the other parts take their rows as soon as they are drawn. Any other random number is refused, and so is
batch normalisation: it would see a part of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.errors import ModelError
from echelon.parallel.masks import BatchMasks
from echelon.parallel.micro import ModelCall, cut_call, joined, part_of

_WHERE = "replicas in threads"
T = TypeVar("T")


class ThreadMasks(BatchMasks):
    """The masks of one call, for parts that compute at the same time."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self._changed = Condition()
        self._first_ended = False
        self._state = torch.get_rng_state()

    def mask(
        self,
        index: int,
        begin: int,
        end: int,
        shape: Sequence[int],
        draw: Callable[[Sequence[int]], Tensor],
    ) -> Tensor:
        """The rows of the mask with this number; parts but the first wait until that one has drawn it."""
        with self._changed:
            if begin == 0:
                self.check_only_masks()
                found = super().mask(index, begin, end, shape, draw)
                self._state = torch.get_rng_state()
                self._changed.notify_all()
                return found
            self._changed.wait_for(lambda: index < len(self._drawn) or self._first_ended)
            return super().mask(index, begin, end, shape, draw)

    def end_first(self) -> None:
        """The first part has ended, so that nobody waits for it."""
        with self._changed:
            self._first_ended = True
            self._changed.notify_all()

    def check_only_masks(self) -> None:
        """Refuse random numbers that were drawn since the mask before, and not as a mask."""
        if not torch.equal(torch.get_rng_state(), self._state):
            raise ModelError(
                "the model draws random numbers in its forward pass that are not dropout masks, so parts "
                "of a batch would not train as the whole batch does",
                where=_WHERE,
                fix="use processes instead of threads, or draw them outside the model",
            )


class ThreadedModel:
    """Runs a model's calls in `replicas` threads, each with `threads` of torch's own."""

    def __init__(self, model: nn.Module, replicas: int, threads: int) -> None:
        if any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules()):
            raise ModelError(
                "batch normalisation sees one part of the batch in each thread",
                where=_WHERE,
                fix="use processes, whose statistics span all samples",
            )
        self._model = model
        self._replicas = replicas
        self._own = model.forward
        self._had_own = vars(model).get("forward")
        self._pool = ThreadPoolExecutor(
            replicas, "replica", initializer=torch.set_num_threads, initargs=(threads,)
        )
        model.forward = self._forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        call = cut_call((args, kwargs), lambda rows: min(self._replicas, rows))
        if not torch.is_grad_enabled():
            return joined(self.run(call, trains=False), call.edges)
        structure: list[Any] = []
        trained = [p for p in self._model.parameters() if p.requires_grad]
        flat = _Threaded.apply(self, call, structure, *trained)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(flat), structure[0])

    def run(self, call: ModelCall, *, trains: bool) -> list[Any]:
        """The outputs of all parts."""
        masks = ThreadMasks(call.rows)

        def part(at: int) -> Any:
            args, kwargs = call.part(at)
            try:
                with torch.set_grad_enabled(trains), call.precision.again(), masks.of(*call.edges[at]):
                    return self._own(*args, **kwargs)
            finally:
                if at == 0:
                    masks.end_first()

        outputs = self.at_once(part, len(call.edges))
        masks.check_only_masks()
        return outputs

    def at_once(self, part: Callable[[int], T], count: int) -> list[T]:
        """Compute all parts in threads. When one fails, the others end before that is raised."""
        futures = [self._pool.submit(part, at) for at in range(count)]
        errors = [one.exception() for one in futures]
        failed = next((error for error in errors if error is not None), None)
        if failed is not None:
            raise failed
        return [one.result() for one in futures]

    def close(self) -> None:
        """Give the model back, and end the threads."""
        self._pool.shutdown()
        if self._had_own is None:
            vars(self._model).pop("forward", None)
        else:
            self._model.forward = self._had_own


class _Threaded(torch.autograd.Function):
    """A call of the model as one operation for autograd, whose inputs are the parameters."""

    @staticmethod
    def forward(
        ctx: Any, threaded: ThreadedModel, call: ModelCall, structure: list[Any], *trained: Tensor
    ) -> Any:
        """Run all parts, with graphs of their own."""
        ctx.threaded, ctx.call, ctx.trained = threaded, call, trained
        ctx.outputs = threaded.run(call, trains=True)
        leaves, spec = pytree.tree_flatten(joined(ctx.outputs, call.edges))
        structure.append(spec)
        out = tuple(leaf.detach() for leaf in leaves)
        ctx.mark_non_differentiable(*(leaf for leaf in out if not leaf.is_floating_point()))
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """The gradients of all parameters, summed over the parts."""
        call, trained = ctx.call, ctx.trained

        def part(at: int) -> Sequence[Tensor | None]:
            pairs = [
                (leaf, part_of(grad, call.rows, call.edges[at]))
                for leaf, grad in zip(pytree.tree_leaves(ctx.outputs[at]), grads, strict=True)
                if grad is not None and leaf.requires_grad
            ]
            if not pairs:
                return [None] * len(trained)
            roots, given = zip(*pairs, strict=True)
            found: Sequence[Tensor | None] = torch.autograd.grad(roots, trained, given, allow_unused=True)
            return found

        found = ctx.threaded.at_once(part, len(call.edges))
        return None, None, None, *(_sum(parts) for parts in zip(*found, strict=True))


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [one for one in parts if one is not None]
    if not there:
        return None
    total, *others = there
    for one in others:
        total = total + one  # not in place: a gradient may be part of a graph's memory
    return total
