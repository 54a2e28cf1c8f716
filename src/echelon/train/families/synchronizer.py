"""What keeps a worker's models synchronised with the other workers': the contract of every family.

One subclass for each family of policies: `reduce.py` (gradients are reduced in backward), `serve.py` (a
parameter server), `mix.py` (averages of weights), `share.py` (hogwild), `levels.py` (two of these). The
session calls the methods in the same order on all workers and does not know how they work.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.config.choices import FactorRule, check_word
from echelon.config.choices import Overlap as Overlap
from echelon.errors import ConfigError
from echelon.reduce.piggyback import Piggyback
from echelon.train import batchnorm
from echelon.train import consistency as agree

Explain = Callable[[str, str, str], None]  # topic, reason, sentence for the report


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """How a model is synchronised; see `Session.prepare`."""

    batchnorm: Literal["global", "local"] = "global"
    loss: Literal["mean", "sum"] = "mean"
    overlap: Overlap = "backward"
    factors: FactorRule = "auto"
    codec: str = ""  # empty: the run's codec

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(ModelOptions).items():
            if typing.get_origin(hint) is Literal:
                check_word(name, getattr(self, name), typing.get_args(hint), where="session.prepare")


class Synchronizer(ABC):
    """Synchronises all models and optimizers of a run, on one worker."""

    meets_every_step = False
    """Whether all workers take the same steps, and wait for the slowest in each."""

    same_on_all = False
    """Whether models and optimizers are the same on all workers after a step, until the next one."""

    claims = False
    """Whether workers claim parts of batches from a common order, as they need them."""

    @property
    def slots(self) -> tuple[int, Callable[[int], int]] | None:
        """How many parts of a batch are claimed, and which is this worker's; None: one for each worker."""
        return None

    def claim(self, ticket: Callable[[], int]) -> int:
        """Claim the next part; returns its number."""
        return ticket()

    @abstractmethod
    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Synchronise a model from now on."""

    @abstractmethod
    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Take over an optimizer; call `before` and `after` once around each of its steps."""

    def begin(self) -> None:
        """Called once after everything of one `prepare` has been added."""
        return

    def carry(self, piggyback: Piggyback) -> None:
        """Let numbers travel with the gradients of the first model that has room for them, if any has."""
        return

    def keep(self, active: bool) -> None:
        """Keep gradients on this worker while `active`."""
        return

    def weigh(self, weight: float, batch: int = 0) -> None:
        """Set the weight of this worker's loss; `batch` is the size of the global batch, if known."""
        return

    def resolve_with(self, resolve: Callable[[], None]) -> None:
        """Call `resolve`, which may call `weigh`, before a weight is used in a backward pass."""
        return

    @abstractmethod
    def refresh(self, *, ended: bool, trains: bool) -> None:
        """A pass over the data begins, or has `ended`; all workers call it. `trains`: the pass trains."""

    def left(self) -> None:
        """This worker left a loop over a loader in the middle; the others may not have."""
        return

    def depart(self) -> None:
        """This worker takes no steps for a while; the others may."""
        return

    def before_step(self, optimizer: Optimizer, where: str) -> None:
        """Refuse a step that would apply wrong gradients."""
        return

    def not_reduced(self, optimizer: Optimizer) -> list[tuple[str, Tensor | None]]:
        """The optimizer's gradients, if no backward pass has reduced any since its last step; else none."""
        return []

    def replicas(self) -> list[tuple[str, Tensor]]:
        """The weights that must be the same on all workers now, by name."""
        return []

    def renew(self, model: nn.Module) -> list[str]:
        """Parameters of a model may have been replaced: synchronise the new ones; returns their names."""
        return []

    def settle(self) -> None:
        """Wait for everything in flight, and apply it."""
        return

    def before_save(self) -> None:
        """Bring everything that a checkpoint needs to the leader."""
        self.settle()

    def after_save(self) -> None:
        """The checkpoint has been written."""
        return

    def before_load(self) -> None:
        """A checkpoint is about to be read, compared with what was prepared, and loaded."""
        self.settle()

    def nothing_loaded(self) -> None:
        """There was no checkpoint to load."""
        return

    def loaded(self) -> None:
        """All workers have loaded a checkpoint's weights and states."""
        return

    def own_state(self) -> dict[str, Any]:
        """What only this worker has, for a checkpoint, besides codec states; before `before_save`."""
        return {}

    def restore_own(self, states: Sequence[dict[str, Any]]) -> None:
        """Take over the own states of a checkpoint's workers, by rank; after `loaded`."""
        return

    def residuals(self) -> dict[str, Any]:
        """This worker's codec states for a checkpoint; empty if there are none."""
        return {}

    def restore_residuals(self, residuals: Sequence[dict[str, Any]]) -> None:
        """Take over the residuals of a checkpoint's workers, by rank."""
        return

    def lost(self, slots: Sequence[int]) -> str:
        """What is lost with these workers, by their first ranks, for the user; empty if nothing is."""
        return ""

    def shared_state(self) -> dict[str, Any]:
        """What a worker needs that comes back, besides weights and optimizer states."""
        return {}

    def adopt_shared(self, state: dict[str, Any]) -> None:
        """This worker comes back: take over another one's."""
        return

    def finish(self) -> None:
        """The last epoch is over; all workers call it."""
        return

    @abstractmethod
    def close(self) -> None:
        """Remove all hooks from models and optimizers."""

    def closed(self) -> None:
        """Called after the group was closed."""
        return


class IndependentSynchronizer(Synchronizer):
    """What synchronizers have in common whose workers' weights may differ for a while."""

    def __init__(self, group: Group, name: str, explain: Explain) -> None:
        self._group = group
        self._name = name
        self._explain = explain
        self._models: list[nn.Module] = []

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Start from the leader's weights. Batch normalisation uses each worker's own statistics."""
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
    """Replace the optimizer's step by `step`, which gets the original; returns how to undo it."""
    own = vars(optimizer).get("step")  # a scheduler may have replaced it too
    inner = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    vars(optimizer)["step"] = _ReplacedStep(optimizer, step, lambda: inner(optimizer))

    def undo() -> None:
        del vars(optimizer)["step"]
        if own is not None:
            vars(optimizer)["step"] = own

    return undo


class _ReplacedStep:
    """Replaces an optimizer's `step`."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Callable[[], None]], None],
        own: Callable[[], None],
    ) -> None:
        self._optimizer = optimizer
        self._step = step
        self._own = own
        self._wrapped_by_lr_sched = True  # schedulers check it; their own bookkeeping is done below

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
