"""Writes down the steps of a script: of its optimizers, or those that it makes by hand.

A script without an optimizer updates its weights itself, as in `p.data.add_(p.grad, alpha=-lr)`. That it
has done so is seen when its next backward pass begins: the weights are others than after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from echelon.check.notes import LossNote, OptimizerNote, StepNote, WorkerNotes, before_file, step_file
from echelon.check.tensors import KeptTensor, digest, keep


class StepWriter:
    """Notes the steps of one worker. Only the leader writes tensors.

    names  the names of the prepared models' parameters, by id
    """

    def __init__(self, folder: Path, notes: WorkerNotes, names: dict[int, str]) -> None:
        self._folder = folder
        self._notes = notes
        self._names = names
        self._known: list[Optimizer | None] = []

    @property
    def total(self) -> int:
        """How many steps all optimizers together have taken."""
        return len(self._notes.steps)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that have stepped."""
        return [optimizer for optimizer in self._known if optimizer is not None]

    def taken(self, optimizer: Optimizer | None) -> int:
        """How many steps an optimizer has taken; None: those made by hand."""
        for index, known in enumerate(self._known):
            if known is optimizer:
                return sum(step.optimizer == index for step in self._notes.steps)
        return 0

    def begin(self, optimizer: Optimizer | None, parameters: Sequence[Tensor]) -> None:
        """Note an optimizer and the weights before its first step; once."""
        if any(known is optimizer for known in self._known):
            return
        self._known.append(optimizer)
        names = [
            self._names.get(id(p), f"parameter {position} {list(p.shape)}")
            for position, p in enumerate(parameters)
        ]
        unprepared = [
            name
            for name, p in zip(names, parameters, strict=True)
            if id(p) not in self._names and p.requires_grad
        ]
        kind = "by hand" if optimizer is None else type(optimizer).__name__
        self._notes.optimizers.append(OptimizerNote(kind=kind, names=names, unprepared=unprepared))
        if self._notes.rank == 0:
            weights = {f"w{i}": keep(p).values for i, p in enumerate(parameters)}
            save_file(weights, before_file(self._folder, len(self._known) - 1))

    def add(
        self,
        optimizer: Optimizer | None,
        parameters: Sequence[Tensor],
        gradients: Sequence[KeptTensor | None],
        losses: list[LossNote],
        samples: int | None,
    ) -> None:
        """Note a step that was taken."""
        index = next(at for at, known in enumerate(self._known) if known is optimizer)
        if self._notes.rank == 0:
            save_file(_arrays(parameters, gradients), step_file(self._folder, self.total))
        groups = [] if optimizer is None else optimizer.param_groups
        note = StepNote(
            optimizer=index,
            number=self.taken(optimizer) + 1,
            losses=losses,
            samples=samples,
            settings=[_numbers(group) for group in groups],
            digests=[digest(p) for p in parameters],
        )
        self._notes.steps.append(note)


class HandMadeSteps:
    """Notices that weights were changed between two backward passes without an optimizer."""

    def __init__(self) -> None:
        self._gradients: list[KeptTensor | None] | None = None
        self._digests: list[str] = []

    def passed(self, parameters: Sequence[Tensor]) -> None:
        """A backward pass has ended."""
        self._gradients = gradients_of(parameters)
        self._digests = [digest(p) for p in parameters]

    def taken(self, parameters: Sequence[Tensor]) -> list[KeptTensor | None] | None:
        """The gradients of the step that was made since then; None if there was none."""
        gradients = self._gradients
        if gradients is None or [digest(p) for p in parameters] == self._digests:
            return None
        self._gradients = None
        return gradients


def gradients_of(parameters: Sequence[Tensor]) -> list[KeptTensor | None]:
    """What is kept of each parameter's gradient."""
    return [None if p.grad is None else keep(p.grad) for p in parameters]


def _arrays(parameters: Sequence[Tensor], gradients: Sequence[KeptTensor | None]) -> dict[str, Tensor]:
    """Gradients, weights and the norms of both."""
    found: dict[str, Tensor] = {}
    norms = torch.zeros(len(parameters), 2, dtype=torch.float64)
    for index, (p, gradient) in enumerate(zip(parameters, gradients, strict=True)):
        weight = keep(p)
        found[f"w{index}"] = weight.values
        norms[index, 1] = weight.norm
        if gradient is not None:
            found[f"g{index}"] = gradient.values
            norms[index, 0] = gradient.norm
    return {**found, "norms": norms}


def _numbers(group: dict[str, Any]) -> dict[str, float]:
    """The numbers of a parameter group, such as the learning rate."""
    return {
        name: float(value)
        for name, value in group.items()
        if isinstance(value, (int, float, Tensor))
        and not isinstance(value, bool)
        and (not isinstance(value, Tensor) or value.numel() == 1)
    }
