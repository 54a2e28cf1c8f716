"""One run of layers that a worker has: its forward passes, what comes to it and what it hands over.

Most workers of a pipeline have one, and it is a stage. With several chunks a worker's are not next to each
other, and each has its own links to the chunks before and after it.
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
from echelon.parallel.chain import Given, LayerChain
from echelon.parallel.masks import BatchMasks
from echelon.parallel.micro import KeptMicro, ModelCall
from echelon.parallel.pass_times import PassTimes
from echelon.parallel.passing import (
    TAGS_OF_A_LINK,
    GradientReceiver,
    HandedReceiver,
    HandedSender,
    Outbox,
    describe,
)
from echelon.parallel.split import HookWatch
from echelon.parallel.strategies.pipeline import Pipeline

# Tags of messages: those of the output and what follows it, then those of each chunk of the chain.
OUTPUT = 0
LOSS, RANDOM_AFTER = OUTPUT + TAGS_OF_A_LINK, OUTPUT + TAGS_OF_A_LINK + 1
_CHUNKS = RANDOM_AFTER + 1
_ACTIVATIONS, _GRADIENTS, _RANDOM = 0, TAGS_OF_A_LINK, TAGS_OF_A_LINK + 1
_TAGS_OF_A_CHUNK = TAGS_OF_A_LINK + 2
_IN_PLACE = "a leaf Variable that requires grad is being used in an in-place operation"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """Layers `begin` to `end`, which are number `stage` of the parts that a chain is cut into.

    `ranks` are the workers of all parts, in the order of the chain; with several chunks for each worker
    they come again.
    """

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
        """The worker that has the next part; of the last one, its own."""
        return self.ranks[min(self.stage + 1, len(self.ranks) - 1)]

    @property
    def before(self) -> int:
        """The worker that has the part before; of the first one, its own."""
        return self.ranks[max(self.stage - 1, 0)]


@dataclass(slots=True)
class ChunkRun:
    """Forward passes of a call under way. `random`: they may draw; `trains`: backward passes follow.

    `alone`: backward passes do not come in between.
    """

    call: ModelCall
    keys: list[Any]
    masks: BatchMasks
    random: bool
    trains: bool
    alone: bool
    outputs: list[Any] = field(default_factory=list)


class StageChunk:
    """Runs forward passes of its layers, number `at` of its worker's. Sends go through `outbox`."""

    def __init__(
        self,
        at: int,
        chain: LayerChain,
        part: StagePart,
        group: Group,
        outbox: Outbox,
        *,
        buffers: Sequence[Tensor],
        options: Pipeline,
        training: Callable[[], bool],
    ) -> None:
        self._at = at
        self._chain = chain
        self.part = part
        self._group = group
        self._outbox = outbox
        self._buffers = buffers
        self._options = options
        self._training = training
        self.times = PassTimes()
        ranks = part.ranks
        if not part.is_first:
            self._from_before = HandedReceiver(group, part.before, _tag(part.stage, _ACTIVATIONS))
        if part.is_last:
            others = dict.fromkeys(rank for rank in ranks if rank != ranks[-1])
            self._outputs = [HandedSender(outbox, rank, OUTPUT) for rank in others]
        else:
            self._to_after = HandedSender(outbox, part.after, _tag(part.stage + 1, _ACTIVATIONS))

    def begin(self, call: ModelCall, keys: list[Any], *, alone: bool) -> ChunkRun:
        """Expect a call's micro-batches."""
        if not self.part.is_first:
            self._from_before.expect(keys)
        return ChunkRun(call, keys, BatchMasks(call.rows), self._training(), torch.is_grad_enabled(), alone)

    @property
    def has_come(self) -> bool:
        """Whether the next micro-batch is there, so that `forward` does not wait."""
        return self.part.is_first or self._from_before.has_come

    def forward(self, run: ChunkRun, micro: int) -> None:
        """The forward pass of a micro-batch."""
        call = run.call
        carried, received = self._carried(run.trains)
        if run.random and micro == 0 and not self.part.is_first:
            self._receive_random()
        begin, end = call.edges[micro]
        given = call.part(micro)
        watch = HookWatch() if run.trains and self._options.schedule == "filled" else nullcontext()
        state = torch.get_rng_state() if run.random and begin else None
        with call.precision.again(), watch:  # 1F1B runs it where the loss is called
            first = FirstPass((given, carried)) if self._recomputes(run) else None
            with run.masks.of(begin, end):
                values = self._run(given, carried)
        if state is not None:
            run.masks.check(state)
        elif run.random:
            self._send_random()
        handed = self._hand(values, run.keys[micro], run.outputs)
        if not run.trains:
            return
        kept = KeptMicro(received, handed, isinstance(watch, HookWatch) and watch.hooked)
        call.kept[self._at, micro] = kept
        if first is not None:
            again = first.again(run.masks, call.rows, begin, end, self._buffers)
            kept.again = lambda: self._handed_again(given, carried, again)
            kept.handed = [torch.empty_like(one, device="meta") for one in handed]
            run.outputs = [pytree.tree_map(detached, one) for one in run.outputs]

    def gradients(self) -> GradientReceiver:
        """Receives what comes back for what this chunk hands over."""
        return GradientReceiver(self._group, self.part.after, _tag(self.part.stage + 1, _GRADIENTS))

    def send_back(self, gradient: Tensor) -> None:
        """Send the gradient of something that this chunk has received."""
        self._outbox.send(gradient, self.part.before, _tag(self.part.stage, _GRADIENTS))

    def _recomputes(self, run: ChunkRun) -> bool:
        """Whether activations of a pass are computed again; not if its backward pass follows soon."""
        is_soon = self.part.is_last and not run.alone
        return run.trains and self._options.recompute and not is_soon

    def _handed_again(
        self, given: Given, carried: Sequence[Any], again: AbstractContextManager[None]
    ) -> list[Tensor]:
        with again:
            _, tensors = describe(self._run(given, carried))
        return [tensor for tensor in tensors if tensor.requires_grad]

    def _carried(self, trains: bool) -> tuple[Sequence[Any], list[Tensor]]:
        """What the chunk before hands over, and which of it carries gradients."""
        if self.part.is_first:
            return (), []
        with self.times.waiting():
            described, tensors = self._from_before.take()
        received = []
        for spec, tensor in zip(described.tensors, tensors, strict=True):
            if spec.trained and trains:
                received.append(tensor.requires_grad_())
        values: Sequence[Any] = described.build(tensors)
        return values, received

    def _run(self, given: Given, carried: Sequence[Any]) -> tuple[Any, ...]:
        try:
            return self._chain.run(self.part.begin, self.part.end, given, carried)
        except RuntimeError as error:
            if _IN_PLACE not in str(error):
                raise
            name = self._chain.names[self.part.begin]
            raise ModelError(
                f"stage {self.part.stage}, which begins with {name}, changes its input in place",
                where="forward pass of a pipeline",
                fix="cut elsewhere, with the option cuts of pipeline, or compute it out of place",
            ) from error

    def _hand(self, values: tuple[Any, ...], key: Any, outputs: list[Any]) -> list[Tensor]:
        """Send what the layers yield; returns what carries gradients."""
        if self.part.is_last:
            outputs.append(values[0])
            _, tensors = describe(values)
            for sender in self._outputs:
                sender.send(values, key)
        else:
            _, tensors = self._to_after.send(values, key)
        return [tensor for tensor in tensors if tensor.requires_grad]

    def _send_random(self) -> None:
        """The next chunk goes on with the state of random numbers; after the last one, everybody does."""
        part, state = self.part, torch.get_rng_state()
        if not part.is_last:
            self._outbox.send(state, part.after, _tag(part.stage + 1, _RANDOM))
            return
        for rank in dict.fromkeys(part.ranks):
            if rank != part.ranks[-1]:
                self._outbox.send(state, rank, RANDOM_AFTER)

    def _receive_random(self) -> None:
        state = torch.empty_like(torch.get_rng_state())
        tag = _tag(self.part.stage, _RANDOM)
        with self.times.waiting():
            torch.set_rng_state(self._group.receive(state, self.part.before, tag).wait())


def detached(value: Any) -> Any:
    """A tensor without its graph; anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value


def _tag(stage: int, kind: int) -> int:
    return _CHUNKS + stage * _TAGS_OF_A_CHUNK + kind
