"""What did the script forget to prepare? Said at the first optimizer step, or at the end.

    nothing was prepared              every worker trains the whole job by itself
    the model was left out            its weights are not synchronised: an error, since they drift apart
    the loader was left out           every worker draws all samples
    what prepare returned is unused   the script iterates over its own loader: an error

With several workers a session watches which loaders are iterated over, and which optimizers step. With one
worker there is nothing to forget.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torch.utils.hooks import RemovableHandle

from echelon.errors import DataError, ModelError
from echelon.train.loader import SharedLoader
from echelon.train.run_state import Prepared


class ForgottenParts:
    """Watches one worker's script. `warn` says something once, to the user."""

    def __init__(self, prepared: Prepared, workers: int, warn: Callable[[str], None]) -> None:
        self._prepared = prepared
        self._workers = workers
        self._warn = warn
        self._own_iter = DataLoader.__iter__
        self._handle: RemovableHandle | None = None
        self._iterated: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()  # not prepared, in training
        self._checked: set[int] = set()
        self._stepped = False

    def install(self) -> None:
        """Watch from now on."""
        own, watch = self._own_iter, weakref.WeakMethod(self._iterating)

        @functools.wraps(own)
        def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
            seen = watch()
            if seen is not None:
                seen(loader)
            return own(loader)

        iterate.echelon = self  # type: ignore[attr-defined]
        DataLoader.__iter__ = iterate  # type: ignore[method-assign,assignment]
        self._handle = register_optimizer_step_pre_hook(self.stepping)

    def remove(self) -> None:
        """Watch no longer."""
        if getattr(DataLoader.__iter__, "echelon", None) is self:
            DataLoader.__iter__ = self._own_iter  # type: ignore[method-assign]
        if self._handle is not None:
            self._handle.remove()

    def close(self) -> None:
        """The script is over. If it has no optimizer, it may still have trained on loaders of its own."""
        if not self._prepared.models and not self._stepped:
            for loader in list(self._iterated):
                if _whole(loader):
                    self._warn(_loader_left_out(loader, self._workers))
                    return

    def _iterating(self, loader: DataLoader[Any]) -> None:
        inner = any(loader is prepared.inner for prepared in self._prepared.loaders)
        if not inner and not isinstance(loader, SharedLoader) and torch.is_grad_enabled():
            self._iterated.add(loader)

    def stepping(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer is about to take a step."""
        self._stepped = True
        if id(optimizer) in self._checked:
            return
        self._checked.add(id(optimizer))
        if not self._prepared.models:
            self._warn(_nothing_prepared(self._workers))
            return
        self._check_parameters(optimizer)
        self._check_loaders()

    def _check_parameters(self, optimizer: Optimizer) -> None:
        known = {id(p) for model in self._prepared.models for p in model.parameters()}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        strange = [p for p in held if id(p) not in known and p.requires_grad]
        if not strange:
            return
        told = (
            f"{len(strange)} of the {len(held)} tensors that {type(optimizer).__name__} updates belong to "
            f"no prepared model; the first has the shape {list(strange[0].shape)}"
        )
        if any(optimizer is one for one in self._prepared.optimizers):
            raise ModelError(
                f"{told}: nothing keeps them the same on all workers",
                where="the first step of the optimizer",
                fix="prepare the model too: model, optimizer, loader = session.prepare(model, optimizer, "
                "loader); a layer that was replaced after prepare needs a new optimizer",
            )
        self._warn(f"{told}; each worker trains them by itself")

    def _check_loaders(self) -> None:
        if any(loader.draws_to_train for loader in self._prepared.loaders):
            return
        for loader in list(self._iterated):
            if any(loader is prepared.given for prepared in self._prepared.loaders):
                raise DataError(
                    "the script iterates over the loader that it gave to prepare, so every worker draws "
                    "all samples",
                    where="the first step of the optimizer",
                    fix="use what prepare returned: model, optimizer, loader = session.prepare(model, "
                    "optimizer, loader)",
                )
            if _whole(loader):
                self._warn(_loader_left_out(loader, self._workers))


def _whole(loader: DataLoader[Any]) -> bool:
    """Whether each worker draws all samples from it, as far as can be seen."""
    return not isinstance(loader.dataset, IterableDataset) and not isinstance(
        loader.sampler, DistributedSampler
    )


def _nothing_prepared(workers: int) -> str:
    return (
        f"session.prepare was not called: each of the {workers} workers trains the whole job by itself. "
        "Write model, optimizer, loader = session.prepare(model, optimizer, loader) before the loop"
    )


def _loader_left_out(loader: DataLoader[Any], workers: int) -> str:
    try:
        samples = f"all {len(loader.dataset):,} samples"  # type: ignore[arg-type]
    except TypeError:
        samples = "all samples"
    return (
        f"the script iterates over a DataLoader that was not prepared: each of the {workers} workers draws "
        f"{samples}. Give the loader to session.prepare too, which shares it out"
    )
