"""What is noted of a running script: the losses, gradients and weights of its first steps.

The probe sees the session (join, prepare, batches), every backward pass and every optimizer step, without a
change to the script. After the steps that were asked for it raises SystemExit, on all workers after the
same step, so that nobody waits for anybody.
"""

from __future__ import annotations

import functools
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echelon.check.batches import TrainedBatches, seed_all, watch_loaders
from echelon.check.draws import AlignedDraws, DrawRecord, RecordedDraws, place_in_script
from echelon.check.notes import (
    CheckRequest,
    LossNote,
    OptimizerNote,
    StepNote,
    WorkerNotes,
    before_file,
    step_file,
    write_notes,
)
from echelon.check.patches import replace
from echelon.check.saves import RedirectedSaves
from echelon.plan.shares import Slice
from echelon.train.session import Session

_SAMPLE = 16_384  # elements of a tensor that are kept
_GLOBAL_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Probe:
    """The probe of one worker; as a context manager it is installed for the block."""

    def __init__(self, folder: Path, request: CheckRequest, *, rank: int, workers: int) -> None:
        self._folder = folder
        self._request = request
        self._notes = WorkerNotes(rank=rank)
        self._session: Session | None = None
        self._names: dict[int, str] = {}
        self._optimizers: list[Optimizer] = []
        self._prepared: list[Optimizer] = []
        self._losses: list[LossNote] = []
        self._ended = False
        self._seeded = 0
        self._batches = TrainedBatches()
        self._saves = RedirectedSaves(folder, rank)
        self._draw_target = RecordedDraws(Path(request.draws)) if request.draws else DrawRecord(folder)
        self._draws = AlignedDraws(self._draw_target, self._batches, rank=rank, workers=workers)
        self._stack = ExitStack()

    def __enter__(self) -> Probe:
        seed_all(self._seeded)  # a script that does not seed is the same on both sides too
        stack = self._stack
        stack.callback(self._write)
        stack.callback(self._draw_target.close)
        self._saves.install(stack)
        watch_loaders(stack, self._batches, self._draws)
        replace(stack, Session, "__init__", self._seeing_join)
        replace(stack, Session, "prepare", self._seeing_prepare)
        replace(stack, Session, "_on_batch", self._seeing_batch)
        replace(stack, torch.autograd, "backward", self._seeing_backward)
        replace(stack, torch, "manual_seed", self._seeing_seed)
        stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
        stack.enter_context(self._draws)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _write(self) -> None:
        notes = self._notes
        notes.saves = self._saves.count
        notes.unaligned = self._draws.unaligned
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
            self._note_prepared(things, options)
            prepared = original(session, *things, **self._comparable(options))
            if self._request.nudge:
                _nudge(things)
            self._draws.active = True
            self._seed_again()
            return prepared

        return prepare

    def _seed_again(self) -> None:
        """From here on all workers draw the same numbers, whatever streams they had."""
        self._seeded += 1
        seed_all(self._seeded)

    def _note_prepared(self, things: tuple[Any, ...], options: dict[str, Any]) -> None:
        notes = self._notes
        notes.loss = options.get("loss", notes.loss)
        notes.codec = options.get("codec") or notes.codec
        for thing in things:
            if isinstance(thing, nn.Module):
                suffix = f" of model {notes.models}" if notes.models else ""
                self._names |= {id(p): name + suffix for name, p in thing.named_parameters()}
                notes.local += _local_norms(thing, options.get("batchnorm", "global"))
                notes.models += 1
            elif isinstance(thing, Optimizer):
                self._prepared.append(thing)
            elif hasattr(thing, "dataset"):
                notes.loaders += 1

    def _comparable(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of `prepare`, without those that make both sides hard to compare."""
        if options.get("batch") == "per-worker":
            self._notes.remarks.append('batch="per-worker" was compared as batch="global"')
            options = {**options, "batch": "global"}
        return {**options, "overlap": "backward"}  # with "step" the results are the same, but come later

    def _seeing_batch(self, original: Any) -> Any:
        def on_batch(session: Session, loader: Any, part: Slice) -> None:
            self._batches.handed(part, session._plan.weights, session.rank)
            original(session, loader, part)

        return on_batch

    def _seeing_seed(self, original: Any) -> Any:
        def manual_seed(seed: int) -> Any:
            self._notes.seeds.append((int(seed), place_in_script()))
            return original(seed)

        return manual_seed

    # The steps -----------------------------------------------------------------------------------

    def _seeing_backward(self, original: Any) -> Any:
        def backward(tensors: Any, *args: Any, **options: Any) -> None:
            roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if len(roots) == 1 and roots[0].numel() == 1 and roots[0].is_floating_point():
                value = float(roots[0].detach())
                self._losses.append(LossNote(value=value, weight=self._weight()))
            self._batches.trained()
            original(tensors, *args, **options)

        return backward

    def _weight(self) -> float:
        """The weight of this worker's loss in the sum over all workers."""
        if self._session is None or self._session.world_size == 1 or self._notes.loss == "sum":
            return 1.0
        return float(getattr(self._session._synchronizer, "weight", 1 / self._session.world_size))

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._ended:
            self._end()
        index = self._index(optimizer)
        taken = self._taken(index)
        if taken >= self._request.steps:
            self._end()
        if taken == 0 and self._notes.rank == 0:
            with self._draws.paused(), torch.no_grad():
                weights = {f"w{i}": _sampled(p) for i, p in enumerate(_parameters(optimizer))}
                save_file(weights, before_file(self._folder, index))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        index = self._index(optimizer)
        with self._draws.paused(), torch.no_grad():
            self._note_step(optimizer, index)
        self._draws.next_segment()
        self._write()
        self._seed_again()
        expected = {id(one): one for one in [*self._optimizers, *self._prepared]}.values()
        if all(self._taken(self._index(one)) >= self._request.steps for one in expected):
            self._end()

    def _note_step(self, optimizer: Optimizer, index: int) -> None:
        parameters = _parameters(optimizer)
        if self._notes.rank == 0:
            save_file(_tensors(parameters), step_file(self._folder, len(self._notes.steps)))
        note = StepNote(
            optimizer=index,
            number=self._taken(index) + 1,
            losses=self._losses,
            samples=self._batches.stepped(),
            settings=[_numbers(group) for group in optimizer.param_groups],
            digests=[_digest(p) for p in parameters],
        )
        self._notes.steps.append(note)
        self._losses = []

    def _index(self, optimizer: Optimizer) -> int:
        """The optimizer's number; a new one is noted with its parameters."""
        for index, known in enumerate(self._optimizers):
            if known is optimizer:
                return index
        self._optimizers.append(optimizer)
        names, unprepared = [], []
        for position, p in enumerate(_parameters(optimizer)):
            name = self._names.get(id(p), f"parameter {position} {list(p.shape)}")
            names.append(name)
            if id(p) not in self._names and p.requires_grad:
                unprepared.append(name)
        kind = type(optimizer).__name__
        self._notes.optimizers.append(OptimizerNote(kind=kind, names=names, unprepared=unprepared))
        return len(self._optimizers) - 1

    def _taken(self, index: int) -> int:
        return sum(step.optimizer == index for step in self._notes.steps)

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


@torch.no_grad()
def _nudge(things: tuple[Any, ...]) -> None:
    """Change every weight of the models among these in its last digit, up or down."""
    signs = np.random.Generator(np.random.PCG64(0))
    for model in things:
        if isinstance(model, nn.Module):
            for p in model.parameters():
                up = torch.from_numpy(signs.integers(2, size=tuple(p.shape)) * 2 - 1).to(p.device)
                p.mul_((1 + up * torch.finfo(p.dtype).eps).to(p.dtype))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _local_norms(model: nn.Module, rule: str) -> list[str]:
    """The normalisation layers that will use this worker's samples only."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (rule == "local" or type(module) not in _GLOBAL_NORMS)
    ]


def _tensors(parameters: list[Tensor]) -> dict[str, Tensor]:
    """Samples of gradients and weights, and the norms of both."""
    found: dict[str, Tensor] = {}
    norms = torch.zeros(len(parameters), 2, dtype=torch.float64)
    for index, p in enumerate(parameters):
        found[f"w{index}"] = _sampled(p)
        norms[index, 1] = _norm(p)
        if p.grad is not None:
            found[f"g{index}"] = _sampled(p.grad)
            norms[index, 0] = _norm(p.grad)
    return {**found, "norms": norms}


def _sampled(tensor: Tensor) -> Tensor:
    """The tensor's values, or those at fixed positions if there are many; in 32 or 64 bits."""
    flat = _flat(tensor)
    if len(flat) > _SAMPLE:
        flat = flat[_positions(len(flat))]
    wide = flat.to(torch.float64 if flat.dtype == torch.float64 else torch.float32)
    return wide.clone().cpu()


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_flat(tensor), dtype=torch.float64))


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1)


@functools.lru_cache(maxsize=64)
def _positions(count: int) -> Tensor:
    return torch.from_numpy(np.random.Generator(np.random.PCG64(0)).integers(count, size=_SAMPLE))


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1).contiguous().cpu()
    return str(xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data))


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The numbers of a parameter group, such as the learning rate."""
    return {
        name: float(value)
        for name, value in group.items()
        if isinstance(value, (int, float, Tensor))
        and not isinstance(value, bool)
        and (not isinstance(value, Tensor) or value.numel() == 1)
    }
