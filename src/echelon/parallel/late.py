"""Backward passes that come late, so that a pipeline is not emptied between two steps.

With schedule `stale` a worker computes the backward passes of a batch while forward passes of later batches
go on. With weights w and gradients g of the loss of batch t by the weights of its own forward pass,

    backward() of batch t hands over g(t - delay; w(t - delay)), and the first ones nothing

(Narayanan et al., 2019 and 2021: PipeDream, whose stages have different delays, and PipeDream-2BW). A
forward pass uses copies of the weights, so that its backward pass sees the same values after the optimizer
has changed the model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from echelon.parallel.backward import BackwardPasses
from echelon.parallel.micro import ModelCall, part_of
from echelon.parallel.pass_times import PassTimes
from echelon.parallel.split import Gradients
from echelon.parallel.stage_chunk import StageChunk


class WeightCopies:
    """Lets the modules of a model compute with copies of some of its parameters."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        position = {id(p): at for at, p in enumerate(parameters)}
        self._parameters = list(parameters)
        self._places = [
            (module, name, position[id(p)])
            for module in model.modules()
            for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(p) in position
        ]

    @contextmanager
    def used(self, call: ModelCall) -> Iterator[None]:
        """In the block, the passes of a call compute with copies of their own."""
        copies = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        call.weights = copies
        try:
            self._put(copies)
            yield
        finally:
            self._put(self._parameters)

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for module, name, at in self._places:
            setattr(module, name, parameters[at])


@dataclass(slots=True)
class _LateBatch:
    """A batch whose backward passes are under way; `left` are the micro-batches that are not done."""

    call: ModelCall
    of_outputs: Sequence[Tensor | None]
    weight: float
    passes: BackwardPasses
    left: deque[int]


class LateBatches:
    """The batches of one worker whose gradients are not handed over yet, the oldest first."""

    def __init__(self, chunk: StageChunk, delay: int) -> None:
        self._chunk = chunk
        self._delay = delay
        self._coming = chunk.gradients()
        self._batches: deque[_LateBatch] = deque()

    def add(self, call: ModelCall, of_outputs: Sequence[Tensor | None], weight: float) -> None:
        """The backward passes of a call may begin; `weight` is for its gradients."""
        micros = range(len(call.edges))
        if not self._chunk.part.is_last:
            for micro in micros:
                self._coming.expect(call.kept[0, micro].handed)
        total: Gradients = [None] * len(call.weights)
        passes = BackwardPasses(call.weights, self._chunk.send_back, splits=False, total=total)
        self._batches.append(_LateBatch(call, of_outputs, weight, passes, deque(micros)))

    @property
    def can_go_on(self) -> bool:
        """Whether a backward pass can be computed without waiting for another worker."""
        return self._next is not None and (self._chunk.part.is_last or self._coming.has_come)

    @property
    def _next(self) -> _LateBatch | None:
        return next((batch for batch in self._batches if batch.left), None)

    def go_on(self, times: PassTimes) -> None:
        """Compute the next backward pass."""
        batch = self._next
        assert batch is not None
        micro, call = batch.left.popleft(), batch.call
        with times.of("backward", micro):
            if self._chunk.part.is_last:
                edge = call.edges[micro]
                given = [None if one is None else part_of(one, call.rows, edge) for one in batch.of_outputs]
                batch.passes.of(call.kept.pop((0, micro)), given)
            else:
                with times.waiting():
                    taken = self._coming.take()
                batch.passes.of(call.kept.pop((0, micro)), taken)

    def due(self, times: PassTimes) -> tuple[Gradients, float] | None:
        """The gradients of the batch that is `delay` batches old, and their weight; None at first."""
        if len(self._batches) <= self._delay:
            return None
        while self._batches[0].left:
            self.go_on(times)
        batch = self._batches.popleft()
        return batch.passes.total, batch.weight

    def drop(self) -> None:
        """Forget all gradients that are under way; all workers of the pipeline call this together."""
        while self._next is not None:  # what other workers send for them has to be received
            self.go_on(PassTimes())
        self._batches.clear()
