"""One side of `echelon bench step` on one worker: a model with a batch and an optimizer, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from echelon.bench.step_notes import TimedStep
from echelon.bench.workloads import Workload, loss_of

Prepare = Callable[[nn.Module, torch.optim.Optimizer], tuple[nn.Module, torch.optim.Optimizer]]


class StepTrainer:
    """A model with a batch and an optimizer; each call of `step` is one step.

    prepare  makes the side of a plain model and optimizer
    meet     returns on all workers when all have called it
    """

    def __init__(self, job: Workload, prepare: Prepare, meet: Callable[[], None]) -> None:
        model, self._x, self._y = job.make()
        self._parameters = list(model.parameters())
        self._computed = 0.0
        self._meet = meet
        _last_computed(model, self._x, self._y).register_post_accumulate_grad_hook(self._note)
        self._model, self._optimizer = prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def _note(self, _: Tensor) -> None:
        self._computed = time.perf_counter()

    def step(self) -> TimedStep:
        """One step of training."""
        begun = time.perf_counter()
        self._optimizer.zero_grad()
        loss_of(self._model, self._x, self._y).backward()
        reduced = time.perf_counter()
        self._optimizer.step()
        return TimedStep(begun=begun, computed=self._computed, reduced=reduced, ended=time.perf_counter())

    def turn(self, steps: int) -> list[TimedStep]:
        """Some steps, which all workers begin together."""
        self._meet()
        found = [self.step() for _ in range(steps)]
        for p in self._parameters:
            p.detach()  # updates that were deferred belong to these steps
        return found


def _last_computed(model: nn.Module, x: Tensor, y: Tensor) -> nn.Parameter:
    """The parameter whose gradient backward computes last."""
    order: list[Tensor] = []
    handles = [p.register_post_accumulate_grad_hook(order.append) for p in model.parameters()]
    loss_of(model, x, y).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return next(p for p in model.parameters() if p is order[-1])
