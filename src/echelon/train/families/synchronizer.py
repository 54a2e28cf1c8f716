"""How a worker's models come to agree with the others': what the session asks of every sync policy.

One subclass for each family of policies: `in_step.py` (gradients are reduced in backward), `by_server.py`
(a parameter server), `by_mixing.py` (averages of weights), `one_memory.py` (hogwild). The session calls
these in the same order on all workers and knows nothing of how it is done.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.config.choices import FactorRule, check_word
from echelon.config.choices import Overlap as Overlap
from echelon.errors import ConfigError
from echelon.train import batchnorm
from echelon.train import consistency as agree

Explain = Callable[[str, str, str], None]  # topic, why, what to tell the user


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is kept in step; see `Session.prepare`."""

    batchnorm: Literal["global", "local"] = "global"
    loss: Literal["mean", "sum"] = "mean"
    overlap: Overlap = "backward"
    factors: FactorRule = "auto"
    codec: str = ""  # the run's

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(ModelOptions).items():
            if typing.get_origin(hint) is Literal:
                check_word(name, getattr(self, name), typing.get_args(hint), where="session.prepare")


class Synchronizer(ABC):
    """All models and optimizers of a run, on one worker."""

    claims = False
    """Whether workers take their next batch from a common order, whoever is first, as they need it."""

    @property
    def slots(self) -> tuple[int, Callable[[int], int]] | None:
        """Into how many parts a batch is claimed, and which part that is; every worker's own otherwise."""
        return None

    def claim(self, ticket: Callable[[], int]) -> int:
        """Draw the number of the next part."""
        return ticket()

    @abstractmethod
    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Look after a model from now on."""

    @abstractmethod
    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Look after an optimizer; call back once before and once after every step of it."""

    def begin(self) -> None:
        """All that was given to one call of `prepare` has been added."""
        return

    def keep(self, active: bool) -> None:
        """Whether gradients stay on this worker for now."""
        return

    def weigh(self, weight: float, batch: int = 0) -> None:
        """What this worker's loss counts from now on, as a part of a batch of so many, if that is known."""
        return

    @abstractmethod
    def refresh(self, *, ended: bool, trains: bool) -> None:
        """A pass over the data begins or has ended; `trains`, as far as is known; all workers are here."""

    def left(self) -> None:
        """A loop over a loader was left in the middle, by this worker alone."""
        return

    def depart(self) -> None:
        """This worker takes no step for a while, on its own: no other is here."""
        return

    def before_step(self, optimizer: Optimizer, where: str) -> None:
        """Refuse a step that would do wrong."""
        return

    def settle(self) -> None:
        """Let everything that is on its way land and be applied."""
        return

    def before_save(self) -> None:
        """Everything that is to be in a checkpoint must be on the leader."""
        self.settle()

    def after_save(self) -> None:
        """The checkpoint has been written."""
        return

    def loaded(self) -> None:
        """Weights and states were replaced by a checkpoint's, on all workers."""
        return

    def residuals(self) -> dict[str, Any]:
        """What codecs remember on this worker, for a checkpoint; nothing if there are none."""
        return {}

    def restore_residuals(self, residuals: Sequence[dict[str, Any]]) -> None:
        """Take over what the workers of a checkpoint owed, by rank."""
        return

    def finish(self) -> None:
        """The last epoch is over; all workers are here."""
        return

    @abstractmethod
    def close(self) -> None:
        """Leave models and optimizers alone."""

    def closed(self) -> None:
        """The group is closed as well."""
        return


class IndependentSynchronizer(Synchronizer):
    """Workers whose weights may differ between two meetings: what all such policies have in common."""

    def __init__(self, group: Group, name: str, explain: Explain) -> None:
        self._group = group
        self._name = name
        self._explain = explain
        self._models: list[nn.Module] = []

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Begin with the leader's weights. Statistics of batch norm are each worker's own."""
        if rules.codec:
            raise ConfigError(
                f"with sync {self._name} all models of a run have the run's codec",
                where=f'prepare(codec="{rules.codec}")',
                fix="give it to join(), or as --codec",
            )
        if rules.loss == "sum":
            raise ConfigError(
                f"sync {self._name} weighs gradients by samples, so the loss must be a mean over them",
                where='prepare(loss="sum")',
                fix="use a mean, or sync full",
            )
        agree.share_state(self._group, model)
        self._models.append(model)
        if rules.batchnorm == "global" and batchnorm.layers(model):
            self._explain(
                "batchnorm",
                f"each worker's own: with sync {self._name} workers do not compute at the same time",
                "",
            )

    def _share_buffers(self) -> None:
        for model in self._models:
            buffers = list(model.buffers())
            if buffers:
                agree.share_tensors(self._group, buffers)


def replace_step(optimizer: Optimizer, step: Callable[[Callable[[], None]], None]) -> Callable[[], None]:
    """Let `step` stand in for the optimizer's own, which it is given; returns how to undo that."""
    own = vars(optimizer).get("step")  # a scheduler's, perhaps
    inner = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    vars(optimizer)["step"] = _ReplacedStep(optimizer, step, lambda: inner(optimizer))

    def undo() -> None:
        del vars(optimizer)["step"]
        if own is not None:
            vars(optimizer)["step"] = own

    return undo


class _ReplacedStep:
    """Stands in for an optimizer's `step`."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Callable[[], None]], None],
        own: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._step = step
        self._own = own
        self._wrapped_by_lr_sched = True  # schedulers ask for it: what they would note is noted below

    def __call__(self, closure: object = None) -> None:
        if closure is not None:
            raise ConfigError(
                "a step with a closure computes gradients of its own, which no server can apply",
                where="optimizer.step",
                fix="compute the gradients before the step, or use sync full",
            )
        optimizer = self._optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined]
        for before in optimizer._optimizer_step_pre_hooks.values():
            before(optimizer, (), {})
        self._step(self._own)
        for after in optimizer._optimizer_step_post_hooks.values():
            after(optimizer, (), {})
