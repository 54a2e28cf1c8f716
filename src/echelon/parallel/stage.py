"""One worker's stage of a pipeline: a call of the model goes through it in micro-batches.

`forward` runs this stage's forward passes and returns the model's whole output, on every stage: the last
one sends it to the others, so that each computes the loss as one process does. The output's gradient,
which is the same on all of them, then goes back through the stages. Gradients of parameters are added up
over the micro-batches and handed over once, when the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.comm.group import Group
from echelon.errors import ModelError
from echelon.parallel.again import FirstPass
from echelon.parallel.awaited import AwaitedOutput, called_twice, not_one_tensor
from echelon.parallel.backward import BackwardPasses
from echelon.parallel.chain import Given, LayerChain
from echelon.parallel.holdings import Holdings
from echelon.parallel.losses import MicroLoss
from echelon.parallel.masks import BatchMasks
from echelon.parallel.micro import KeptMicro, ModelCall, cut_call, joined, part_of
from echelon.parallel.pass_times import PassTimes
from echelon.parallel.passing import (
    TAGS_OF_A_LINK,
    GradientReceiver,
    HandedReceiver,
    HandedSender,
    Outbox,
    describe,
)
from echelon.parallel.schedule import StageAction, backward_only, schedule
from echelon.parallel.split import Gradients, HookWatch
from echelon.parallel.strategies.pipeline import Pipeline

_ACTIVATIONS, _OUTPUT = 0, TAGS_OF_A_LINK
_GRADIENTS = 2 * TAGS_OF_A_LINK
_RANDOM, _LOSS = _GRADIENTS + 1, _GRADIENTS + 2
_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_IN_PLACE = "a leaf Variable that requires grad is being used in an in-place operation"


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

    @property
    def after(self) -> int:
        """The worker that has the next stage; of the last stage, itself."""
        return self.ranks[min(self.stage + 1, len(self.ranks) - 1)]


@dataclass(slots=True)
class _StageRun:
    """Forward passes under way. `random`: they may draw; `trains`: they are followed by backward passes.

    `alone`: backward passes do not come in between.
    """

    call: ModelCall
    keys: list[Any]
    masks: BatchMasks
    random: bool
    trains: bool
    alone: bool
    outputs: list[Any] = field(default_factory=list)


class PipelineStage:
    """Runs one stage. `landed` gets the gradients of what it holds after each backward pass."""

    def __init__(
        self,
        chain: LayerChain,
        part: StagePart,
        group: Group,
        holdings: Holdings,
        *,
        options: Pipeline,
        count: Callable[[int], int],
        landed: Callable[[Gradients], None],
        timed: Callable[[PassTimes], None],
        training: Callable[[], bool],
    ) -> None:
        self._chain = chain
        self._part = part
        self._group = group
        self._parameters = list(holdings.own)
        self._buffers = list(holdings.buffers)
        self._options = options
        self._count = count  # of micro-batches, by the number of samples
        self.landed = landed
        self._timed = timed
        self._times = PassTimes()
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
        call = cut_call((args, kwargs), self._count)
        if not torch.is_grad_enabled():
            return self._through(call)
        return self.passed(call) if self._options.schedule == "gpipe" else AwaitedOutput.of(self, call)

    def passed(self, call: ModelCall) -> Any:
        """The model's output by forward passes alone; its gradient starts the backward passes."""
        structure: list[Any] = []
        anchor = torch.zeros((), requires_grad=True)  # so that autograd calls back
        flat = _Passed.apply(anchor, self, call, structure)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(flat), structure[0])

    def _through(self, call: ModelCall) -> Any:
        """Run all forward passes of this stage; keeps what backward needs, if gradients are on."""
        self._times = PassTimes()
        run = self._begin(call, alone=True)
        for micro in range(len(call.edges)):
            with self._times.of("forward", micro):
                self._forward_one(run, micro)
        output = self._end(run)
        if run.trains:
            self._timed(self._times)
        return output

    def scheduled(self, call: ModelCall, loss: MicroLoss) -> tuple[Tensor, Tensor, Gradients]:
        """Run the schedule with a loss: its value, the model's output, and gradients of the parameters."""
        part, options = self._part, self._options
        self._times = PassTimes()
        run, passes = self._begin(call, alone=False), self._backward_passes()
        parts: list[Tensor] = []
        coming = GradientReceiver(self._group, part.after, _GRADIENTS)
        for action in schedule(
            options.schedule, part.stage, len(part.ranks), len(call.edges), options.ahead
        ):
            self._fill(action, passes, coming)
            micro = action.micro
            if action.kind == "forward":
                with self._times.of("forward", micro):
                    self._forward_one(run, micro)
                    if part.is_last:
                        parts.append(self._part_of_loss(run, loss, micro))
                if not part.is_last:
                    coming.expect(call.kept[micro].handed)
            elif action.kind == "backward":
                with self._times.of("backward", micro):
                    given = [torch.ones_like(parts[micro])] if part.is_last else self._take(coming)
                    passes.of(call.kept.pop(micro), given)
                if part.is_last:
                    parts[micro] = parts[micro].detach()
        value = self._told(parts)
        output = pytree.tree_map(_detached, self._end(run))
        self._timed(self._times)
        return value, output, passes.total

    def _fill(self, action: StageAction, passes: BackwardPasses, coming: GradientReceiver) -> None:
        """Compute weights: those that the action is about, and others while it would have to wait."""
        is_due = action.kind == "weights"
        while passes.owes and (passes.weighed <= action.micro if is_due else not self._can(action, coming)):
            with self._times.of("weights", passes.weighed):
                passes.weights()

    def _part_of_loss(self, run: _StageRun, loss: MicroLoss, micro: int) -> Tensor:
        """What a micro-batch adds to the loss; its backward pass starts there."""
        output = run.outputs[micro]
        if not isinstance(output, Tensor):
            raise not_one_tensor(output)
        part = loss.part(output, run.call.edges[micro])
        run.call.kept[micro].handed = [part]
        run.outputs[micro] = output.detach()  # the graph goes with `kept`
        return part

    def _take(self, coming: GradientReceiver) -> list[Tensor]:
        with self._times.waiting():
            return coming.take()

    def _can(self, action: StageAction, coming: GradientReceiver) -> bool:
        """Whether what an action needs from other stages is there."""
        if action.kind == "forward":
            return self._part.is_first or self._from_before.has_come
        return self._part.is_last or coming.has_come

    def _backward_passes(self) -> BackwardPasses:
        part = self._part
        return BackwardPasses(
            self._parameters,
            lambda gradient: self._outbox.send(gradient, part.ranks[part.stage - 1], _GRADIENTS),
            splits=self._options.schedule == "filled",
        )

    def _told(self, parts: list[Tensor]) -> Tensor:
        """The loss, which the last stage tells the others, with its type."""
        ranks = self._part.ranks
        if not self._part.is_last:
            told = torch.empty(2, dtype=torch.float64)
            with self._times.of("result", 0), self._times.waiting():
                self._group.receive(told, ranks[-1], _LOSS).wait()
            return told[0].to(_LOSS_TYPES[int(told[1])])
        total = torch.stack(parts).sum()
        told = torch.tensor([float(total), _LOSS_TYPES.index(total.dtype)], dtype=torch.float64)
        for rank in ranks[:-1]:
            self._outbox.send(told, rank, _LOSS)
        return total

    def _begin(self, call: ModelCall, *, alone: bool) -> _StageRun:
        keys = self._keys(call)
        if not self._part.is_first:
            self._from_before.expect(keys)
        if not self._part.is_last:
            self._output.expect(keys)
        masks, trains = BatchMasks(call.rows), torch.is_grad_enabled()
        return _StageRun(call, keys, masks, self._training(), trains, alone)

    def _forward_one(self, run: _StageRun, micro: int) -> None:
        """The forward pass of a micro-batch."""
        part, call = self._part, run.call
        carried, received = self._carried(run.trains)
        if run.random and micro == 0 and not part.is_first:
            self._receive_random(part.ranks[part.stage - 1])
        begin, end = call.edges[micro]
        given = call.part(micro)
        watch = HookWatch() if run.trains and self._options.schedule == "filled" else nullcontext()
        with call.precision.again(), watch:  # 1F1B runs it where the loss is called
            first = FirstPass((given, carried)) if self._recomputes(run) else None
            with run.masks.of(begin, end):
                values = self._run(given, carried)
        if run.random:
            run.masks.check(begin)
            if micro == 0:
                self._send_random()
        handed = self._hand(values, run.keys[micro], run.outputs)
        if not run.trains:
            return
        kept = call.kept[micro] = KeptMicro(received, handed, isinstance(watch, HookWatch) and watch.hooked)
        if first is not None:
            again = first.again(run.masks, call.rows, begin, end, self._buffers)
            kept.again = lambda: self._handed_again(given, carried, again)
            kept.handed = [torch.empty_like(one, device="meta") for one in handed]
            run.outputs = [pytree.tree_map(_detached, one) for one in run.outputs]

    def _recomputes(self, run: _StageRun) -> bool:
        """Whether activations of a pass are computed again; not if its backward pass is next."""
        is_next = self._part.is_last and not run.alone
        return run.trains and self._options.recompute and not is_next

    def _handed_again(
        self, given: Given, carried: Sequence[Any], again: AbstractContextManager[None]
    ) -> list[Tensor]:
        with again:
            _, tensors = describe(self._run(given, carried))
        return [tensor for tensor in tensors if tensor.requires_grad]

    def _end(self, run: _StageRun) -> Any:
        """The model's output, when all passes of the run have begun."""
        if not self._part.is_last:
            with self._times.of("result", 0), self._times.waiting():
                received = [self._output.take() for _ in run.call.edges]
            run.outputs = [described.build(tensors)[0] for described, tensors in received]
            if run.random:
                self._receive_random(self._part.ranks[-1])
        self._outbox.flush()
        return joined(run.outputs, run.call.edges)

    def _keys(self, call: ModelCall) -> list[Any]:
        """What the shapes within a micro-batch depend on."""
        mode = (self._training(), torch.is_grad_enabled(), call.precision)
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
        with self._times.waiting():
            described, tensors = self._from_before.take()
        received = []
        for spec, tensor in zip(described.tensors, tensors, strict=True):
            if spec.trained and trains:
                received.append(tensor.requires_grad_())
        values: Sequence[Any] = described.build(tensors)
        return values, received

    def _run(self, given: Given, carried: Sequence[Any]) -> tuple[Any, ...]:
        try:
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

    def _send_random(self) -> None:
        """After the last stage, the state of random numbers is everybody's."""
        part = self._part
        to = part.ranks[:-1] if part.is_last else part.ranks[part.stage + 1 : part.stage + 2]
        for rank in to:
            self._outbox.send(torch.get_rng_state(), rank, _RANDOM)

    def _receive_random(self, source: int) -> None:
        state = torch.empty_like(torch.get_rng_state())
        with self._times.waiting():
            torch.set_rng_state(self._group.receive(state, source, _RANDOM).wait())

    # Backward ------------------------------------------------------------------------------------

    def backward(self, call: ModelCall, of_outputs: Sequence[Tensor | None]) -> None:
        """Run all backward passes of this stage; `of_outputs` are the gradients of the model's output."""
        if not call.kept:
            raise called_twice()
        self._times = PassTimes()
        part, passes = self._part, self._backward_passes()
        coming = GradientReceiver(self._group, part.after, _GRADIENTS)
        if not part.is_last:
            for kept in call.kept.values():
                coming.expect(kept.handed)
        for action in backward_only(self._options.schedule, len(call.edges)):
            self._fill(action, passes, coming)
            if action.kind != "backward":
                continue
            with self._times.of("backward", action.micro):
                given = (
                    self._take(coming)
                    if not part.is_last
                    else [
                        None if one is None else part_of(one, call.rows, call.edges[action.micro])
                        for one in of_outputs
                    ]
                )
                passes.of(call.kept.pop(action.micro), given)
        self._outbox.flush()
        self._timed(self._times)
        self.landed(passes.total)


class _Passed(torch.autograd.Function):
    """A call of the model as one operation for autograd."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, stage: PipelineStage, call: ModelCall, structure: list[Any]
    ) -> Any:
        """Run the stage's passes with a graph of their own."""
        ctx.stage, ctx.call = stage, call
        with torch.enable_grad():
            output = stage._through(call)
        leaves, spec = pytree.tree_flatten(output)
        structure.append(spec)
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


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
