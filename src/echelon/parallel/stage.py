"""One worker's stage of a pipeline: a call of the model goes through it in micro-batches.

`forward` runs this stage's forward passes and returns the model's whole output, on every stage: the last
one sends it to the others, so that each computes the loss as one process does. The output's gradient,
which is the same on all of them, then goes back through the stages. Gradients of parameters are added up
over the micro-batches and handed over once, when the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from echelon.comm.group import Group
from echelon.errors import ModelError
from echelon.parallel.chain import Given, LayerChain
from echelon.parallel.masks import BatchMasks
from echelon.parallel.passing import (
    TAGS_OF_A_LINK,
    HandedReceiver,
    HandedSender,
    HandedTensor,
    Outbox,
    describe,
    post_gradients,
)
from echelon.parallel.schedule import schedule

_ACTIVATIONS, _OUTPUT = 0, TAGS_OF_A_LINK
_GRADIENTS = 2 * TAGS_OF_A_LINK
_RANDOM = _GRADIENTS + 1
_IN_PLACE = "a leaf Variable that requires grad is being used in an in-place operation"

Gradients = list[Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Which layers this worker has: `begin` to `end`. `ranks` are the workers of its pipeline, by stage."""

    stage: int
    ranks: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_first(self) -> bool:
        """Whether it begins with the model's input."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the model's output."""
        return self.stage == len(self.ranks) - 1


@dataclass(slots=True)
class _Kept:
    """What the backward pass of a micro-batch needs: tensors that carry gradients."""

    received: list[Tensor]
    handed: list[Tensor]


@dataclass(slots=True)
class _ModelCall:
    """One call of the model, cut into micro-batches by samples."""

    given: Given
    edges: list[tuple[int, int]]
    rows: int
    kept: dict[int, _Kept] = field(default_factory=dict)

    def part(self, micro: int) -> Given:
        """The inputs of one micro-batch: rows of what has a row for each sample, the rest whole."""
        begin, end = self.edges[micro]

        def cut(value: Any) -> Any:
            is_batch = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self.rows
            return value[begin:end] if is_batch else value

        args, kwargs = pytree.tree_map(cut, (self.given[0], dict(self.given[1])))
        return args, kwargs


class PipelineStage:
    """Runs one stage. `landed` gets the gradients of `parameters` after each backward pass."""

    def __init__(
        self,
        chain: LayerChain,
        part: StagePart,
        group: Group,
        parameters: Sequence[nn.Parameter],
        *,
        micro: int,
        landed: Callable[[Gradients], None],
        training: Callable[[], bool],
    ) -> None:
        self._chain = chain
        self._part = part
        self._group = group
        self._parameters = list(parameters)
        self._micro = micro
        self._landed = landed
        self._training = training
        self._outbox = Outbox(group)
        ranks, stage = part.ranks, part.stage
        if not part.is_first:
            self._from_before = HandedReceiver(group, ranks[stage - 1], _ACTIVATIONS)
        if part.is_last:
            self._outputs = [HandedSender(self._outbox, rank, _OUTPUT) for rank in ranks[:-1]]
        else:
            self._to_after = HandedSender(self._outbox, ranks[stage + 1], _ACTIVATIONS)
            self._output = HandedReceiver(group, ranks[-1], _OUTPUT)

    # Forward -------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output; its gradient goes back through the pipeline."""
        call = self._cut((args, kwargs))
        trains = torch.is_grad_enabled()
        if not trains:
            return self._through(call)
        structure: list[Any] = []
        anchor = torch.zeros((), requires_grad=True)  # so that autograd calls back
        flat = _Passed.apply(anchor, self, call, structure)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(flat), structure[0])

    def _cut(self, given: Given) -> _ModelCall:
        leaves = pytree.tree_leaves(given)
        tensors = [one for one in leaves if isinstance(one, Tensor)]
        if any(one.requires_grad for one in tensors):
            raise ModelError(
                "an input of the model needs a gradient, which a pipeline does not compute",
                where="forward pass of a pipeline",
                fix="detach the input, or put the layers before it into the model",
            )
        batch = next((one for one in tensors if one.dim()), None)
        if batch is None or not batch.shape[0]:
            raise ModelError(
                "the model was called without a tensor that has samples",
                where="forward pass of a pipeline",
                fix="give it a batch whose first dimension is the samples",
            )
        rows = batch.shape[0]
        count = min(self._micro, rows)
        ends = [(at + 1) * rows // count for at in range(count)]
        return _ModelCall(given, list(zip([0, *ends[:-1]], ends, strict=True)), rows)

    def _through(self, call: _ModelCall) -> Any:
        """Run all forward passes of this stage; keeps what backward needs, if gradients are on."""
        keys = self._keys(call)
        part, random = self._part, self._training()
        if not part.is_first:
            self._from_before.expect(keys)
        if not part.is_last:
            self._output.expect(keys)
        masks = BatchMasks(call.rows)
        outputs: list[Any] = []
        trains = torch.is_grad_enabled()
        order = schedule("gpipe", part.stage, len(part.ranks), len(call.edges))
        for micro in (action.micro for action in order if action.kind == "forward"):
            carried, received = self._carried(trains)
            if random and micro == 0 and not part.is_first:
                self._receive_random(part.ranks[part.stage - 1])
            begin, end = call.edges[micro]
            values = self._run(call.part(micro), carried, masks.of(begin, end))
            if random:
                masks.check(begin)
                if micro == 0:
                    self._send_random()
            handed = self._hand(values, keys[micro], outputs)
            if trains:
                call.kept[micro] = _Kept(received, handed)
        if not part.is_last:
            outputs = [described.build(tensors)[0] for described, tensors in self._outputs_of(call)]
            if random:
                self._receive_random(part.ranks[-1])
        self._outbox.flush()
        return _joined(outputs, call.edges)

    def _keys(self, call: _ModelCall) -> list[Any]:
        """What the shapes within a micro-batch depend on."""
        mode = (self._training(), torch.is_grad_enabled())
        found = []
        for begin, end in call.edges:
            leaves = pytree.tree_leaves(call.given)
            shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else str(x) for x in leaves)
            found.append((mode, shapes, end - begin))
        return found

    def _carried(self, trains: bool) -> tuple[Sequence[Any], list[Tensor]]:
        """What the stage before hands over, and which of it carries gradients."""
        if self._part.is_first:
            return (), []
        described, tensors = self._from_before.take()
        received = []
        for spec, tensor in zip(described.tensors, tensors, strict=True):
            if spec.trained and trains:
                received.append(tensor.requires_grad_())
        values: Sequence[Any] = described.build(tensors)
        return values, received

    def _run(self, given: Given, carried: Sequence[Any], drawing: Any) -> tuple[Any, ...]:
        try:
            with drawing:
                return self._chain.run(self._part.begin, self._part.end, given, carried)
        except RuntimeError as error:
            if _IN_PLACE not in str(error):
                raise
            name = self._chain.names[self._part.begin]
            raise ModelError(
                f"stage {self._part.stage}, which begins with {name}, changes its input in place",
                where="forward pass of a pipeline",
                fix="cut elsewhere, with the option cuts of pipeline, or compute it out of place",
            ) from error

    def _hand(self, values: tuple[Any, ...], key: Any, outputs: list[Any]) -> list[Tensor]:
        """Send what the stage yields; returns what carries gradients."""
        if self._part.is_last:
            outputs.append(values[0])
            _, tensors = describe(values)
            for sender in self._outputs:
                sender.send(values, key)
        else:
            _, tensors = self._to_after.send(values, key)
        return [tensor for tensor in tensors if tensor.requires_grad]

    def _outputs_of(self, call: _ModelCall) -> list[Any]:
        return [self._output.take() for _ in call.edges]

    def _send_random(self) -> None:
        """After the last stage, the state of random numbers is everybody's."""
        part = self._part
        to = part.ranks[:-1] if part.is_last else part.ranks[part.stage + 1 : part.stage + 2]
        for rank in to:
            self._outbox.send(torch.get_rng_state(), rank, _RANDOM)

    def _receive_random(self, source: int) -> None:
        state = torch.empty_like(torch.get_rng_state())
        torch.set_rng_state(self._group.receive(state, source, _RANDOM).wait())

    # Backward ------------------------------------------------------------------------------------

    def backward(self, call: _ModelCall, of_outputs: Sequence[Tensor | None]) -> None:
        """Run all backward passes of this stage; `of_outputs` are the gradients of the model's output."""
        if not call.kept:
            raise ModelError(
                "backward() was called twice for one forward pass of a pipeline",
                where="backward pass of a pipeline",
                fix="run the model again, or add up losses before backward()",
            )
        part = self._part
        micros = sorted(call.kept)
        if not part.is_last:
            wanted = [
                [HandedTensor(tuple(one.shape), one.dtype, True) for one in call.kept[micro].handed]
                for micro in micros
            ]
            take = post_gradients(self._group, part.ranks[part.stage + 1], _GRADIENTS, wanted)
        total: Gradients = [None] * len(self._parameters)
        for micro in micros:
            kept = call.kept.pop(micro)
            rows = call.edges[micro]
            found = self._gradients(kept, _rows_of(of_outputs, rows, call.rows) if part.is_last else take())
            if not part.is_first:
                for tensor, gradient in zip(kept.received, found, strict=False):
                    own = torch.zeros_like(tensor) if gradient is None else gradient
                    self._outbox.send(own, part.ranks[part.stage - 1], _GRADIENTS)
            _add(total, found[len(kept.received) :])
        self._outbox.flush()
        self._landed(total)

    def _gradients(self, kept: _Kept, given: Sequence[Tensor | None]) -> Gradients:
        """The gradients of what was received, then of the parameters."""
        pairs = [
            (one, gradient)
            for one, gradient in zip(kept.handed, given, strict=True)
            if gradient is not None and one.requires_grad
        ]
        inputs: list[Tensor] = [*kept.received, *self._parameters]
        if not pairs or not inputs:
            return [None] * len(inputs)
        return list(
            torch.autograd.grad(
                [one for one, _ in pairs], inputs, [gradient for _, gradient in pairs], allow_unused=True
            )
        )


class _Passed(torch.autograd.Function):
    """A call of the model as one operation for autograd."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, stage: PipelineStage, call: _ModelCall, structure: list[Any]
    ) -> Any:
        """Run the stage's passes with a graph of their own."""
        ctx.stage, ctx.call = stage, call
        with torch.enable_grad():
            output = stage._through(call)
        leaves, spec = pytree.tree_flatten(output)
        structure.append(spec)
        if any(not isinstance(leaf, Tensor) for leaf in leaves):
            raise _no_batch("something that is no tensor")
        out = tuple(leaf.detach() for leaf in leaves)
        ctx.mark_non_differentiable(*(leaf for leaf in out if not leaf.is_floating_point()))
        ctx.floating = [leaf.is_floating_point() for leaf in out]
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Hand the gradients to the last stage; every stage runs its backward passes."""
        kept = [grad for grad, floating in zip(grads, ctx.floating, strict=True) if floating]
        ctx.stage.backward(ctx.call, kept)
        return None, None, None, None


def _rows_of(grads: Sequence[Tensor | None], edge: tuple[int, int], rows: int) -> list[Tensor | None]:
    """The gradients' rows of one micro-batch."""
    found: list[Tensor | None] = []
    for grad in grads:
        times = 1 if grad is None else grad.shape[0] // rows
        found.append(None if grad is None else grad[edge[0] * times : edge[1] * times])
    return found


def _joined(outputs: Sequence[Any], edges: Sequence[tuple[int, int]]) -> Any:
    """The micro-batches' outputs as one, along the samples."""
    flats = [pytree.tree_flatten(output) for output in outputs]
    for (leaves, _), (begin, end) in zip(flats, edges, strict=True):
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] % (end - begin):
                what = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
                raise _no_batch(what)
    columns = zip(*(leaves for leaves, _ in flats), strict=True)
    return pytree.tree_unflatten([torch.cat(column) for column in columns], flats[0][1])


def _no_batch(what: str) -> ModelError:
    return ModelError(
        f"the model returns {what} for a micro-batch, so micro-batches cannot be joined",
        where="forward pass of a pipeline",
        fix="return tensors with a row for each sample, and compute means outside the model",
    )


def _add(total: Gradients, found: Gradients) -> None:
    for at, gradient in enumerate(found):
        if gradient is None:
            continue
        known = total[at]
        total[at] = gradient.clone() if known is None else known.add_(gradient)
