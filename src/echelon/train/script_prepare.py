"""How do a script's models, optimizers, loaders and schedulers become part of the run? By `prepare`.

The session inherits this. What can be prepared is in `preparable.py`. All workers prepare the same, which
is compared (`consistency.py`) before anything is attached.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack, get_args, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from echelon.config.choices import FactorRule, Overlap, check_word
from echelon.errors import ConfigError
from echelon.parallel.layout import is_auto
from echelon.train import consistency
from echelon.train.arranging import gradient_bytes
from echelon.train.families.synchronizer import ModelOptions
from echelon.train.loader import BatchMeaning, SharedLoader, Sharing
from echelon.train.preparable import Preparable, PrepareOptions, refuse_model
from echelon.train.script_loop import ScriptLoop
from echelon.train.verifying import refuse_preparing

A = TypeVar("A", bound=Preparable)
B = TypeVar("B", bound=Preparable)
C = TypeVar("C", bound=Preparable)
D = TypeVar("D", bound=Preparable)


class ScriptPrepare(ScriptLoop):
    """The session's preparing; the session sets what is declared here."""

    device: torch.device
    _sharing: Sharing | None

    @overload
    def prepare(self, thing: A, /, **options: Unpack[PrepareOptions]) -> A: ...
    @overload
    def prepare(self, first: A, second: B, /, **options: Unpack[PrepareOptions]) -> tuple[A, B]: ...
    @overload
    def prepare(
        self, first: A, second: B, third: C, /, **options: Unpack[PrepareOptions]
    ) -> tuple[A, B, C]: ...
    @overload
    def prepare(
        self, first: A, second: B, third: C, fourth: D, /, **options: Unpack[PrepareOptions]
    ) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(self, *things: Preparable, **options: Unpack[PrepareOptions]) -> tuple[Any, ...]: ...
    def prepare(
        self,
        *things: Any,
        batch: BatchMeaning = "global",
        batchnorm: Literal["global", "local"] = "global",
        loss: Literal["mean", "sum"] = "mean",
        parallel: str | None = None,
        overlap: Overlap | None = None,
        factors: FactorRule | None = None,
        codec: str | None = None,
        random: Literal["own", "same"] = "own",
    ) -> Any:
        """Make models, optimizers, loaders and schedulers part of the run, in any number and order.

        Returns them in the same order; a single one by itself. Models, optimizers and schedulers are the
        script's own objects. A loader is replaced by one that draws this worker's share of every batch.

        batch      what a loader's batch_size is: the batch of all workers (global), or per-worker
        batchnorm  statistics over all workers' samples (global), or over each worker's own (local)
        loss       whether the script's loss is the mean or the sum over its samples
        parallel   how the models are spread over workers, such as "pipeline(stages=2) * data": see `echelon
                   list parallel`. Once for a run, in its first `prepare`. auto: by measured cost
        overlap    backward: gradients are complete when `backward()` returns. step: `backward()` and the
                   optimizer's `step()` return at once, and using a parameter or gradient waits for it; the
                   results are the same, and more communication is hidden
        factors    whether linear layers send the factors of their weights' gradients instead: auto (where
                   that is cheaper), always or never
        codec      how these models' gradients are encoded
        random     own: from the first `prepare` on, every worker draws random numbers of its own, such as
                   dropout masks and noise; the leader those that one process would draw. same: all workers
                   draw the same numbers if they were seeded alike

        The defaults of parallel, overlap, factors and codec are the run's. All workers call it with the
        same things. Example:

            model, optimizer, loader = session.prepare(model, optimizer, loader)
        """
        check_word("batch", batch, get_args(BatchMeaning), where="session.prepare")
        check_word("random", random, ("own", "same"), where="session.prepare")
        rules = ModelOptions(
            batchnorm=batchnorm,
            loss=loss,
            overlap=overlap or self._plan.overlap,
            factors=factors or self._plan.factors,
            codec=codec or "",
        )
        refuse_preparing(self._verifier, rules, codec or self._plan.codec)
        if self._changes is not None:
            self._changes.preparing = True
        self._agree("prepare" if parallel is None else f"prepare with parallel {parallel}")
        if is_auto(self._plan.parallel if parallel is None else parallel):
            parallel = self._picked_layout(things, rules, per_worker=batch == "per-worker")
        if parallel is not None:
            self._lay_out(parallel, where=f"prepare(parallel={parallel!r})")
        facts: list[consistency.Fact] = []
        out: list[Any] = []
        models: list[nn.Module] = []
        for position, thing in enumerate(things):
            out.append(self._take(thing, position, batch, rules, models, facts))
        consistency.check(self._group, facts, [worker.node for worker in self._plan.workers])
        if models and self.world_size > 1 and self._changes is None and not self._clock.step:
            self._check_memory()
        self._guard.same_samples([one for one in out if isinstance(one, SharedLoader)])
        self._profiling.preparing(models)
        if self._thread_replicas:
            rules = replace(rules, factors="never")  # threads call a layer at the same time
        for model in models:
            self._synchronizer.add(model, rules)
            self._in_threads(model)
            self._verifier.attach(model)
            if self.world_size > 1:
                self._weights.attach(model, marks=rules.loss == "mean")
        self._synchronizer.begin()
        self._profiling.prepared()
        if models and self._arranger is not None:
            self._arranger.prepared(sum(gradient_bytes(model) for model in self._prepared.models))
        self._guard.prepared(own_streams=random == "own")
        if self._changes is not None:
            self._changes.preparing = False
        return out[0] if len(out) == 1 else tuple(out)

    def _check_memory(self) -> None:
        """Refuse a layout that does not fit; with servers, states are theirs."""
        if self._synchronizer.meets_every_step and not self._synchronizer.claims:
            kept, parts = self._prepared, self._layout != "data" and not self._thread_replicas
            order = self._neighbours() if parts else ()
            self._memory.prepared(kept.models, kept.optimizers, self._layout, parts=parts, order=order)

    def _take(
        self,
        thing: Any,
        position: int,
        batch: BatchMeaning,
        rules: ModelOptions,
        models: list[nn.Module],
        facts: list[consistency.Fact],
    ) -> Any:
        """Register one thing by its type, and describe it for the comparison with the other workers'."""
        kept = self._prepared
        if isinstance(thing, nn.Module):
            if any(thing is model for model in kept.models):
                return thing
            refuse_model(thing)
            thing.to(self.device)
            facts += consistency.describe_model(thing, len(kept.models))
            kept.models.append(thing)
            models.append(thing)
            return thing
        if isinstance(thing, Optimizer):
            if any(thing is optimizer for optimizer in kept.optimizers):
                return thing
            facts += consistency.describe_optimizer(thing, len(kept.optimizers))
            self._adopt(thing, rules)
            return thing
        if isinstance(thing, SharedLoader):
            return thing
        if isinstance(thing, DataLoader):
            loader = SharedLoader(thing, len(kept.loaders), self._data_sharing(), batch)
            facts += consistency.describe_loader(loader, len(kept.loaders))
            kept.loaders.append(loader)
            return loader
        if isinstance(thing, LRScheduler):
            kept.schedulers.append(thing)
            return thing
        raise ConfigError(
            f"prepare does not know what to do with a {type(thing).__name__}",
            where=f"prepare, argument {position + 1}",
            fix="give it models, optimizers, DataLoaders and learning-rate schedulers",
        )

    def _adopt(self, optimizer: Optimizer, rules: ModelOptions) -> None:
        self._prepared.optimizers.append(optimizer)
        self._clock.optimizers += 1
        self._synchronizer.adopt(
            optimizer,
            rules.overlap,
            before=lambda: self._before_step(optimizer),
            after=lambda: self._after_step(optimizer),
        )

    def _data_sharing(self) -> Sharing:
        if self._sharing is None:
            self._sharing = Sharing(
                group=self._view,
                shares=self._shares,
                copies=self._copies,
                seed=self._plan.seed,
                clock=self._clock,
                device=self.device,
                claim=self._claim if self._synchronizer.claims else None,
                slots=self._synchronizer.slots,
                on_begin=lambda: self._continue(counts=False),
                on_pass=self._on_pass,
                on_ask=self._batch_asked,
                on_batch=self._on_batch,
                on_break=self._synchronizer.left,
                on_error=self._group.left_loop,
                slot=None if self._changes is None else self._changes.slot,
                is_out=lambda: self._is_out,
                on_drained=None if self._changes is None else self._drained,
                owed=None if self._changes is None else self._changes.drawn.owed,
            )
        return self._sharing
