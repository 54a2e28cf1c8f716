"""One worker's part of a pipeline: a call of the model goes through it in micro-batches.

`forward` runs this worker's forward passes and returns the model's whole output, on every stage: the last
one sends it to the others, so that each computes the loss as one process does. The output's gradient,
which is the same on all of them, then goes back through the stages. Gradients of parameters are added up
over the micro-batches and handed over once, when the last one is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.comm.group import Group
from echelon.parallel.awaited import AwaitedOutput, called_twice, not_one_tensor
from echelon.parallel.backward import BackwardPasses
from echelon.parallel.chain import LayerChain
from echelon.parallel.holdings import Holdings
from echelon.parallel.late import LateBatches, WeightCopies
from echelon.parallel.losses import MicroLoss
from echelon.parallel.micro import ModelCall, cut_call, joined, part_of
from echelon.parallel.pass_times import PassTimes
from echelon.parallel.passing import GradientReceiver, HandedReceiver, Outbox
from echelon.parallel.schedule import StageAction, backward_only, forward_only, schedule
from echelon.parallel.split import Gradients
from echelon.parallel.stage_chunk import (
    LOSS,
    OUTPUT,
    RANDOM_AFTER,
    ChunkRun,
    StageChunk,
    StagePart,
    detached,
)
from echelon.parallel.strategies.pipeline import Pipeline

_LOSS_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _BackwardWay:
    """The backward passes of one call through one chunk: what comes back, and what is computed with it."""

    def __init__(
        self, chunk: StageChunk, parameters: Sequence[Tensor], total: Gradients, splits: bool
    ) -> None:
        self.part = chunk.part
        self.coming: GradientReceiver = chunk.gradients()
        self.passes = BackwardPasses(parameters, chunk.send_back, splits=splits, total=total)

    @property
    def has_come(self) -> bool:
        """Whether the next backward pass need not wait for another worker."""
        return self.part.is_last or self.coming.has_come


class PipelineStage:
    """Runs the parts of one worker.

    count    of micro-batches, by the number of samples
    weight   of this replica's loss, when a backward pass ends
    landed   gets the gradients of what this worker holds, and their weight, after each backward pass
    copies   with schedule stale: of the weights, for each batch
    """

    def __init__(
        self,
        chain: LayerChain,
        parts: Sequence[StagePart],
        group: Group,
        holdings: Holdings,
        *,
        options: Pipeline,
        count: Callable[[int], int],
        weight: Callable[[], float],
        landed: Callable[[Gradients, float], None],
        timed: Callable[[PassTimes], None],
        training: Callable[[], bool],
        copies: WeightCopies,
    ) -> None:
        self._group = group
        self._parameters = list(holdings.own)
        self._options = options
        self._count = count
        self._weight = weight
        self._landed = landed
        self._timed = timed
        self._times = PassTimes()
        self._training = training
        self._outbox = Outbox(group)
        self._ranks = parts[0].ranks
        self._worker, self._workers = parts[0].stage, len(self._ranks) // len(parts)
        self._is_last = parts[-1].is_last
        self._chunks = [
            StageChunk(
                at,
                chain,
                part,
                group,
                self._outbox,
                buffers=holdings.buffers,
                options=options,
                training=training,
            )
            for at, part in enumerate(parts)
        ]
        self._copies = copies
        self._late = LateBatches(self._chunks[0], options.late) if options.late else None
        if not self._is_last:
            self._output = HandedReceiver(group, self._ranks[-1], OUTPUT)

    def _actions(self, micro: int) -> list[StageAction]:
        options = self._options
        return schedule(
            options.schedule, self._worker, self._workers, micro, options.ahead, len(self._chunks)
        )

    def _times_begin(self) -> None:
        self._times = PassTimes()
        for chunk in self._chunks:
            chunk.times = self._times

    # Forward -------------------------------------------------------------------------------------

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's output; its gradient goes back through the pipeline."""
        call = cut_call((args, kwargs), self._count)
        if not torch.is_grad_enabled():
            return self._through(call)
        waits = self._options.schedule not in ("gpipe", "stale")
        return AwaitedOutput.of(self, call) if waits else self.passed(call)

    def passed(self, call: ModelCall) -> Any:
        """The model's output by forward passes alone; its gradient starts the backward passes."""
        structure: list[Any] = []
        anchor = torch.zeros((), requires_grad=True)  # so that autograd calls back
        flat = _Passed.apply(anchor, self, call, structure)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(flat), structure[0])

    def _through(self, call: ModelCall) -> Any:
        """Run all forward passes of this worker; keeps what backward needs, if gradients are on."""
        self._times_begin()
        runs = self._begin(call, alone=True)
        keeps_weights = self._late is not None and runs[0].trains
        with self._copies.used(call) if keeps_weights else nullcontext():
            for action in forward_only(self._actions(len(call.edges))):
                chunk = self._chunks[action.chunk]
                self._go_back_until(chunk)
                with self._times.of("forward", action.micro, action.chunk):
                    chunk.forward(runs[action.chunk], action.micro)
                if self._late is not None and self._late.can_go_on:
                    self._late.go_on(self._times)
            output = self._end(call, runs)
        if runs[0].trains:
            self._timed(self._times)
        return output

    def _go_back_until(self, awaited: StageChunk | HandedReceiver) -> None:
        """Compute backward passes of earlier batches, while something has not come."""
        while self._late is not None and self._late.can_go_on and not awaited.has_come:
            self._late.go_on(self._times)

    def scheduled(self, call: ModelCall, loss: MicroLoss) -> tuple[Tensor, Tensor, Gradients]:
        """Run the schedule with a loss: its value, the model's output, and gradients of the parameters."""
        self._times_begin()
        runs = self._begin(call, alone=False)
        ways, total = self._ways()
        parts: list[Tensor] = []
        for action in self._actions(len(call.edges)):
            micro, chunk, way = action.micro, self._chunks[action.chunk], ways[action.chunk]
            self._fill(action, way)
            ends = chunk.part.is_last
            if action.kind == "forward":
                run = runs[action.chunk]
                with self._times.of("forward", micro, action.chunk):
                    chunk.forward(run, micro)
                    if ends:
                        parts.append(_part_of_loss(run, action, loss))
                if not ends:
                    way.coming.expect(call.kept[action.chunk, micro].handed)
            elif action.kind == "backward":
                with self._times.of("backward", micro, action.chunk):
                    given = [torch.ones_like(parts[micro])] if ends else self._take(way)
                    way.passes.of(call.kept.pop((action.chunk, micro)), given)
                if ends:
                    parts[micro] = parts[micro].detach()
        value = self._told(parts)
        output = pytree.tree_map(detached, self._end(call, runs))
        self._timed(self._times)
        return value, output, total

    def _ways(self) -> tuple[list[_BackwardWay], Gradients]:
        total: Gradients = [None] * len(self._parameters)
        splits = self._options.schedule == "filled"
        return [_BackwardWay(chunk, self._parameters, total, splits) for chunk in self._chunks], total

    def _fill(self, action: StageAction, way: _BackwardWay) -> None:
        """Compute weights: those that the action is about, and others while it would have to wait."""
        passes, is_due = way.passes, action.kind == "weights"
        while passes.owes and (passes.weighed <= action.micro if is_due else not self._can(action, way)):
            with self._times.of("weights", passes.weighed, action.chunk):
                passes.weights()

    def _can(self, action: StageAction, way: _BackwardWay) -> bool:
        """Whether what an action needs from other stages is there."""
        return self._chunks[action.chunk].has_come if action.kind == "forward" else way.has_come

    def _take(self, way: _BackwardWay) -> list[Tensor]:
        with self._times.waiting():
            return way.coming.take()

    def _told(self, parts: list[Tensor]) -> Tensor:
        """The loss, which the last stage tells the others, with its type."""
        if not self._is_last:
            told = torch.empty(2, dtype=torch.float64)
            with self._times.of("result", 0), self._times.waiting():
                self._group.receive(told, self._ranks[-1], LOSS).wait()
            return told[0].to(_LOSS_TYPES[int(told[1])])
        total = torch.stack(parts).sum()
        told = torch.tensor([float(total), _LOSS_TYPES.index(total.dtype)], dtype=torch.float64)
        for rank in self._ranks[: self._workers - 1]:
            self._outbox.send(told, rank, LOSS)
        return total

    def _begin(self, call: ModelCall, *, alone: bool) -> list[ChunkRun]:
        keys = self._keys(call)
        if not self._is_last:
            self._output.expect(keys)
        return [chunk.begin(call, keys, alone=alone) for chunk in self._chunks]

    def _end(self, call: ModelCall, runs: list[ChunkRun]) -> Any:
        """The model's output, when all passes have begun."""
        outputs = runs[-1].outputs
        if not self._is_last:
            with self._times.of("result", 0), self._times.waiting():
                received = []
                for _ in call.edges:
                    self._go_back_until(self._output)
                    received.append(self._output.take())
                outputs = [described.build(tensors)[0] for described, tensors in received]
                if runs[-1].random:
                    state = torch.empty_like(torch.get_rng_state())
                    torch.set_rng_state(self._group.receive(state, self._ranks[-1], RANDOM_AFTER).wait())
        self._outbox.flush()
        return joined(outputs, call.edges)

    def _keys(self, call: ModelCall) -> list[Any]:
        """What the shapes within a micro-batch depend on."""
        mode = (self._training(), torch.is_grad_enabled(), call.precision)
        found = []
        for begin, end in call.edges:
            leaves = pytree.tree_leaves(call.given)
            shapes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else str(x) for x in leaves)
            found.append((mode, shapes, end - begin))
        return found

    # Backward ------------------------------------------------------------------------------------

    def backward(self, call: ModelCall, of_outputs: Sequence[Tensor | None]) -> None:
        """Run all backward passes of this worker; `of_outputs` are the gradients of the model's output."""
        if not call.kept:
            raise called_twice()
        self._times_begin()
        if self._late is not None:
            self._late.add(call, of_outputs, self._weight())
            found = self._late.due(self._times)
            self._outbox.flush()
            self._timed(self._times)
            self._landed(*(found or ([None] * len(self._parameters), 0.0)))
            return
        ways, total = self._ways()
        actions = backward_only(self._actions(len(call.edges)))
        for action in actions:
            way = ways[action.chunk]
            if action.kind == "backward" and not way.part.is_last:
                way.coming.expect(call.kept[action.chunk, action.micro].handed)
        for action in actions:
            way = ways[action.chunk]
            self._fill(action, way)
            if action.kind != "backward":
                continue
            with self._times.of("backward", action.micro, action.chunk):
                given = (
                    self._take(way)
                    if not way.part.is_last
                    else [
                        None if one is None else part_of(one, call.rows, call.edges[action.micro])
                        for one in of_outputs
                    ]
                )
                way.passes.of(call.kept.pop((action.chunk, action.micro)), given)
        self._outbox.flush()
        self._timed(self._times)
        self.land(total)

    def land(self, gradients: Gradients) -> None:
        """Hand over the gradients of a call's backward pass, which ends now."""
        self._landed(gradients, self._weight())

    def drop(self) -> None:
        """Forget what is under way from earlier batches; all stages call this together."""
        if self._late is not None:
            self._late.drop()
            self._outbox.flush()


def _part_of_loss(run: ChunkRun, action: StageAction, loss: MicroLoss) -> Tensor:
    """What a micro-batch adds to the loss; its backward pass starts there."""
    micro = action.micro
    output = run.outputs[micro]
    if not isinstance(output, Tensor):
        raise not_one_tensor(output)
    part = loss.part(output, run.call.edges[micro])
    run.call.kept[action.chunk, micro].handed = [part]
    run.outputs[micro] = output.detach()  # the graph goes with `kept`
    return part


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
