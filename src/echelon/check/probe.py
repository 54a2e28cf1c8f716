"""What is noted of a running script: the losses, gradients and weights of its first steps.

The probe sees the session (join, prepare, batches), every backward pass and every optimizer step, without a
change to the script. After the steps that were asked for it raises SystemExit, on all workers after the
same step, so that nobody waits for anybody.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echelon.check.batches import TrainedBatches, seed_all, states_of_others, watch_loaders
from echelon.check.doubles import doubles, to_doubles
from echelon.check.draws import (
    AlignedDraws,
    DrawRecord,
    RecordedDraws,
    called_by_echelon,
    place_in_script,
)
from echelon.check.notes import CheckRequest, LossNote, WorkerNotes, write_notes
from echelon.check.patches import replace
from echelon.check.saves import RedirectedSaves
from echelon.check.steps import HandMadeSteps, StepWriter, gradients_of
from echelon.check.tensors import KeptTensor
from echelon.plan.shares import Slice
from echelon.train.session import Session

_GLOBAL_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Probe:
    """The probe of one worker; as a context manager it is installed for the block."""

    def __init__(self, folder: Path, request: CheckRequest, *, rank: int, workers: int) -> None:
        self._folder = folder
        self._request = request
        self._notes = WorkerNotes(rank=rank)
        self._session: Session | None = None
        self._names: dict[int, str] = {}
        self._parameters: list[Tensor] = []
        self._prepared: list[Optimizer] = []
        self._losses: list[LossNote] = []
        self._ended = False
        self._handed = 0  # batches since the last step
        self._others: tuple[Any, ...] = ()
        self._steps = StepWriter(folder, self._notes, self._names)
        self._hand_made = HandMadeSteps()
        self._batches = TrainedBatches()
        self._saves = RedirectedSaves(folder, rank)
        self._draw_target = RecordedDraws(Path(request.draws)) if request.draws else DrawRecord(folder)
        self._draws = AlignedDraws(
            self._draw_target, self._batches, rank=rank, workers=workers, alternate=request.alternate
        )
        self._stack = ExitStack()

    def __enter__(self) -> Probe:
        seed_all(0)  # a script that does not seed is the same on both sides too
        stack = self._stack
        stack.callback(self._write)
        stack.callback(self._draw_target.close)
        self._saves.install(stack)
        watch_loaders(stack, self._batches, self._draws, to_doubles if self._request.doubles else None)
        replace(stack, Session, "__init__", self._seeing_join)
        replace(stack, Session, "prepare", self._seeing_prepare)
        replace(stack, Session, "_on_batch", self._seeing_batch)
        replace(stack, torch.autograd, "backward", self._seeing_backward)
        replace(stack, torch, "manual_seed", self._seeing_seed)
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        stack.enter_context(doubles(self._request.doubles))
        stack.enter_context(self._draws)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _write(self) -> None:
        notes = self._notes
        notes.saves = self._saves.count
        notes.unaligned = self._draws.unaligned
        notes.guessed = list(self._draws.guessed)
        notes.half = self._draws.half
        notes.unshared = list(self._batches.unshared)
        notes.batch = self._batches.last
        write_notes(self._folder, notes)

    # The session ---------------------------------------------------------------------------------

    def _seeing_join(self, original: Any) -> Any:
        def init(session: Session, *args: Any, **options: Any) -> None:
            original(session, *args, **options)
            self._session = session
            self._notes.workers = session.world_size
            self._notes.sync, self._notes.codec = session._plan.sync, session._plan.codec

        return init

    def _seeing_prepare(self, original: Any) -> Any:
        def prepare(session: Session, *things: Any, **options: Any) -> Any:
            for model in things:
                if self._request.doubles and isinstance(model, nn.Module):
                    model.double()
            self._note_prepared(things, options)
            prepared = original(session, *things, **self._comparable(options))
            self._draws.active = True
            self._seed_again()
            return prepared

        return prepare

    def _seed_again(self) -> None:
        """From here on all workers draw the same numbers, whatever they drew before.

        The seed depends on the step and the batch, not on how often this was called: a rank may do more
        than the others between two steps.
        """
        self._notes.picks |= bool(self._others) and states_of_others() != self._others
        seed_all(zlib.crc32(f"{self._notes.models}/{self._steps.total}/{self._handed}".encode()))
        self._others = states_of_others()

    def _note_prepared(self, things: tuple[Any, ...], options: dict[str, Any]) -> None:
        notes = self._notes
        notes.loss = options.get("loss", notes.loss)
        notes.codec = options.get("codec") or notes.codec
        for thing in things:
            if isinstance(thing, nn.Module) and id(next(thing.parameters(), None)) not in self._names:
                suffix = f" of model {notes.models}" if notes.models else ""
                self._names |= {id(p): name + suffix for name, p in thing.named_parameters()}
                self._parameters += thing.parameters()
                notes.local += _local_norms(thing, options.get("batchnorm", "global"))
                notes.models += 1
            elif isinstance(thing, Optimizer):
                self._prepared.append(thing)

    def _comparable(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `prepare`, without those that make both sides hard to compare."""
        if options.get("batch") == "per-worker":
            self._notes.remarks.append('batch="per-worker" was compared as batch="global"')
            options = {**options, "batch": "global"}
        # With overlap="step" the results are the same, but come later.
        return {**options, "overlap": "backward", "random": "same"}

    def _seeing_batch(self, original: Any) -> Any:
        def on_batch(session: Session, loader: Any, part: Slice, data: Any) -> None:
            self._batches.handed(part, session._plan.weights, session.rank)
            self._handed += 1
            self._seed_again()
            original(session, loader, part, data)

        return on_batch

    def _seeing_seed(self, original: Any) -> Any:
        def manual_seed(seed: int) -> Any:
            if not called_by_echelon():
                self._notes.seeds.append((int(seed), place_in_script()))
            return original(seed)

        return manual_seed

    # The steps -----------------------------------------------------------------------------------

    def _seeing_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            self._before_backward()
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            one = len(roots) == 1 and roots[0].numel() == 1 and roots[0].is_floating_point()
            value = float(roots[0].detach()) if one else None
            self._batches.trained()
            original(tensors, *args, **options)
            if value is not None:  # noted now, because the pass itself has found its weight
                self._losses.append(LossNote(value=value, weight=self._weight()))
            if self._by_hand:
                with self._unwatched():
                    self._hand_made.passed(self._parameters)

        return backward

    def _weight(self) -> float:
        """The weight of this worker's loss in the sum over all workers."""
        if self._session is None or self._session.world_size == 1 or self._notes.loss == "sum":
            return 1.0
        return float(getattr(self._session._synchronizer, "weight", 1 / self._session.world_size))

    @property
    def _by_hand(self) -> bool:
        """Whether the script, as far as is known, makes its steps without an optimizer."""
        return bool(self._parameters) and not self._prepared and not self._steps.optimizers

    def _before_backward(self) -> None:
        if not self._by_hand:
            return
        if self._ended:
            self._end()
        with self._unwatched():
            self._steps.begin(None, self._parameters)
            gradients = self._hand_made.taken(self._parameters)
            if gradients is None:
                return
            self._note_step(None, self._parameters, gradients)
        if self._steps.taken(None) >= self._request.steps:
            self._end()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._ended or self._steps.taken(optimizer) >= self._request.steps:
            self._end()
        with self._unwatched():
            self._steps.begin(optimizer, _parameters(optimizer))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        with self._unwatched():
            parameters = _parameters(optimizer)
            self._note_step(optimizer, parameters, gradients_of(parameters))
        expected = [*self._steps.optimizers, *self._prepared]
        if all(self._steps.taken(one) >= self._request.steps for one in expected):
            self._end()

    def _note_step(
        self, optimizer: Optimizer | None, parameters: list[Tensor], gradients: list[KeptTensor | None]
    ) -> None:
        self._steps.add(optimizer, parameters, gradients, self._losses, self._batches.stepped())
        self._losses = []
        self._notes.picks |= self._draws.picks
        self._handed = 0
        self._draws.next_segment()
        self._write()
        self._seed_again()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        with self._draws.paused(), torch.no_grad():
            yield

    def leave(self) -> None:
        """Close the session, if the script has one."""
        if self._session is not None:
            self._session.close()

    def _end(self) -> None:
        """End the script. If it catches SystemExit and goes on, end its process."""
        if self._ended:
            self._stack.close()
            self.leave()
            os._exit(0)
        self._ended = True
        raise SystemExit(0)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local_norms(model: nn.Module, rule: str) -> list[str]:
    """The normalisation layers that will use this worker's samples only."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (rule == "local" or type(module) not in _GLOBAL_NORMS)
    ]
