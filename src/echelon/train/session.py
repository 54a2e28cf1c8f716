"""The session: what a training script talks to, alone or as one of many workers.

    session = echelon.join()
    model, optimizer, loader = session.prepare(model, optimizer, loader)
    for epoch in session.epochs(10):
        for x, y in loader:
            ...

The script's own objects come back: the same module, the same optimizer, a loader that draws this
worker's share. Gradients are those of the global batch when `backward()` returns.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.errors import ConfigError, EchelonError, ModelError
from echelon.observe.events import (
    CheckpointLoaded,
    CheckpointSaved,
    EpochEnded,
    Evaluated,
    Logged,
    Noted,
    StepsExpected,
)
from echelon.observe.recorder import Recorder
from echelon.observe.run_folder import RunFolder
from echelon.plan.plan import Plan
from echelon.plan.shares import Slice
from echelon.reduce.factors import FactorRule
from echelon.train import consistency as agree
from echelon.train import resume
from echelon.train.clock import StepClock
from echelon.train.collectives import ScriptCollectives, check_choice
from echelon.train.families.choose import choose
from echelon.train.families.synchronizer import ModelOptions, Overlap, Synchronizer
from echelon.train.loader import BatchMeaning, SharedLoader, Sharing

_log = logging.getLogger(__name__)


class Session(ScriptCollectives):
    """One worker's part in a run. Made by `echelon.join`."""

    def __init__(
        self,
        group: Group,
        meeting: Rendezvous | None,
        plan: Plan,
        clock: StepClock,
        recorder: Recorder,
        folder: RunFolder | None,
        device: torch.device,
        links: Links | None = None,
    ) -> None:
        super().__init__(group, [worker.node for worker in plan.workers])
        self._meeting = meeting
        self._plan = plan
        self._clock = clock
        self._recorder = recorder
        self.folder = folder
        self.device = device
        self._prepared = resume.Prepared()
        self._synchronizer: Synchronizer = choose(plan, group, clock, links, self.explain)
        self._sharing: Sharing | None = None
        self._current: SharedLoader | None = None
        self._first_epoch = 0
        self._closed = False

    @property
    def is_leader(self) -> bool:
        """Whether this is the worker that prints and writes for all."""
        return self.rank == 0

    @property
    def node(self) -> str:
        """The machine that this worker runs on."""
        return self._plan.workers[self.rank].node

    @property
    def epoch(self) -> int:
        """The epoch under way, from 0."""
        return self._clock.epoch

    @property
    def step(self) -> int:
        """How many steps the optimizer has taken."""
        return self._clock.step

    # Preparing -----------------------------------------------------------------------------------

    def prepare(
        self,
        *things: Any,
        batch: BatchMeaning = "global",
        batchnorm: Literal["global", "local"] = "global",
        loss: Literal["mean", "sum"] = "mean",
        overlap: Overlap | None = None,
        factors: FactorRule | None = None,
        codec: str | None = None,
    ) -> Any:
        """Make models, optimizers, loaders and schedulers, in any number and order, part of the run.

        batch      what a loader's batch_size means: the batch of all workers, or each worker's
        batchnorm  statistics over all workers' samples (exact), or over each worker's own
        loss       whether the script's loss is the mean or the sum over its samples
        overlap    backward: gradients are there when `backward()` returns; step: it and the optimizer's
                   `step()` return at once, and whoever uses a parameter or a gradient waits for that one
                   (same results, more is hidden); as the run was started otherwise
        factors    whether linear layers send the factors of their weights' gradients in place of these:
                   auto (where it is cheaper), always, never; as the run was started otherwise
        codec      how these models' gradients are written on the wire; the run's codec otherwise
        """
        check_choice("batch", batch, ("global", "per-worker"))
        check_choice("batchnorm", batchnorm, ("global", "local"))
        check_choice("loss", loss, ("mean", "sum"))
        late = overlap or self._plan.overlap
        check_choice("overlap", late, ("backward", "step"))
        rule = factors or self._plan.factors
        check_choice("factors", rule, ("auto", "always", "never"))
        rules = ModelOptions(
            batchnorm=batchnorm,
            loss=loss,
            overlap=cast(Overlap, late),
            factors=cast(FactorRule, rule),
            codec=codec or "",
        )
        facts: list[agree.Fact] = []
        out: list[Any] = []
        models: list[nn.Module] = []
        for position, thing in enumerate(things):
            out.append(self._take(thing, position, batch, rules, models, facts))
        agree.check(self._group, facts, [worker.node for worker in self._plan.workers])
        for model in models:
            self._synchronizer.add(model, rules)
        self._synchronizer.begin()
        return out[0] if len(out) == 1 else tuple(out)

    def _take(
        self,
        thing: Any,
        position: int,
        batch: BatchMeaning,
        rules: ModelOptions,
        models: list[nn.Module],
        facts: list[agree.Fact],
    ) -> Any:
        """Register one thing by what it is, and describe it for the comparison with other workers'."""
        kept = self._prepared
        if isinstance(thing, nn.Module):
            if any(thing is model for model in kept.models):
                return thing
            _refuse(thing)
            thing.to(self.device)
            facts += agree.describe_model(thing, len(kept.models))
            kept.models.append(thing)
            models.append(thing)
            return thing
        if isinstance(thing, Optimizer):
            if any(thing is optimizer for optimizer in kept.optimizers):
                return thing
            facts += agree.describe_optimizer(thing, len(kept.optimizers))
            kept.optimizers.append(thing)
            self._clock.optimizers += 1
            self._synchronizer.adopt(
                thing,
                rules.overlap,
                before=lambda: self._before_step(thing),
                after=lambda: self._clock.applied(id(thing)),
            )
            return thing
        if isinstance(thing, DataLoader):
            loader = SharedLoader(thing, len(kept.loaders), self._data_sharing(), batch)
            facts += agree.describe_loader(loader, len(kept.loaders))
            kept.loaders.append(loader)
            return loader
        if isinstance(thing, LRScheduler):
            kept.schedulers.append(thing)
            return thing
        if isinstance(thing, SharedLoader):
            return thing
        raise ConfigError(
            f"prepare does not know what to do with a {type(thing).__name__}",
            where=f"prepare, argument {position + 1}",
            fix="give it models, optimizers, DataLoaders and learning-rate schedulers",
        )

    def _data_sharing(self) -> Sharing:
        if self._sharing is None:
            self._sharing = Sharing(
                group=self._group,
                weights=self._plan.weights,
                seed=self._plan.seed,
                clock=self._clock,
                device=self.device,
                claim=self._claim if self._synchronizer.claims else None,
                slots=self._synchronizer.slots,
                on_pass=self._on_pass,
                on_batch=self._on_batch,
                on_break=self._synchronizer.left,
            )
        return self._sharing

    # The loop ------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Count from 0, or from where a checkpoint left off, up to `count`."""
        for epoch in range(self._first_epoch, count):
            self._clock.epoch = epoch
            yield epoch
            self._synchronizer.settle()
            self._clock.close()
            self._first_epoch = epoch + 1
            self._recorder.emit(
                EpochEnded(t=time.time(), rank=self.rank, epoch=epoch, step=self._clock.step)
            )
        self._synchronizer.finish()

    @contextmanager
    def accumulate(self, active: bool = True) -> Iterator[None]:
        """Keep gradients local inside; they join the next backward pass outside.

        with session.accumulate(not last):
            (loss_fn(model(x), y) / pieces).backward()
        """
        if not active:
            yield
            return
        self._synchronizer.keep(True)
        try:
            yield
            self._clock.kept()
        finally:
            self._synchronizer.keep(False)

    def weigh(self, count: float) -> None:
        """Say how much this worker's loss counts, where that is not its number of samples.

        For a mean over targets that are not all valid (padding, ignore_index), call it with the number
        of valid ones before `backward()`. All workers call it, or none.
        """
        if (
            self._synchronizer.claims
        ):  # workers take steps at different times: there is no total to agree on
            self._synchronizer.weigh(_counts(count, count, self.rank))
            return
        total = torch.tensor([float(count)], dtype=torch.float64)
        self._group.all_reduce(total).wait()
        self._synchronizer.weigh(_counts(count, float(total), self.rank) / float(total))

    def rest(self) -> None:
        """Say that this worker takes no step until its next pass over the data: nobody waits for it.

        Needed only where a sync policy lets workers take different numbers of steps and a script goes
        through data of its own: a prepared loader says this by itself when a loop over it ends.
        """
        self._synchronizer.depart()

    def log(self, *, loss: Tensor | float | None = None, **values: Tensor | float) -> None:
        """Record the loss of this step, and any other numbers, for the report."""
        if loss is not None:
            self._clock.note_loss(loss)
        if values:
            numbers = {
                name: float(value.detach() if isinstance(value, Tensor) else value)
                for name, value in values.items()
            }
            self._recorder.emit(
                Logged(t=time.time(), rank=self.rank, step=self._clock.step, values=numbers)
            )

    def log_evaluation(self, *, loss: float, samples: int, accuracy: float | None = None) -> None:
        """Record how good the model is on held-out data; the leader's figures are what counts."""
        if self.is_leader:
            self._recorder.emit(
                Evaluated(
                    t=time.time(),
                    rank=self.rank,
                    epoch=self.epoch,
                    step=self._clock.step,
                    loss=loss,
                    accuracy=accuracy,
                    samples=samples,
                )
            )
            self._recorder.flush()

    def expect_steps(self, steps: int) -> None:
        """Say how many steps the whole run will have, for the progress display."""
        if self.is_leader:
            self._recorder.emit(StepsExpected(t=time.time(), rank=self.rank, steps=steps))

    def note(self, text: str) -> None:
        """Record a sentence that the reader of the report should see."""
        _log.info(text)
        self._recorder.emit(Noted(t=time.time(), rank=self.rank, text=text))

    def explain(self, topic: str, why: str, tell: str = "") -> None:
        """Record in the plan why something was decided at run time; `tell` is for the report as well."""
        if self.is_leader:
            self._plan = replace(self._plan, reasons={**self._plan.reasons, topic: why})
            if self.folder is not None:
                self.folder.plan.write_text(self._plan.to_toml())
            if tell:
                self.note(tell)

    def _claim(self, what: str, count: int) -> int:
        """Add to a number that all workers share; returns what it was before."""
        assert self._meeting is not None
        store = self._meeting.store

        def ticket() -> int:
            return int(store.add(f"claim/{what}", count)) - count

        return self._synchronizer.claim(ticket) if count else ticket()

    def _on_pass(self, loader: SharedLoader) -> None:
        self._synchronizer.refresh(ended=loader.finished, trains=loader.trains)

    def _on_batch(self, loader: SharedLoader, part: Slice) -> None:
        self._current = loader
        self._synchronizer.weigh(part.share / part.batch, part.batch)

    def _before_step(self, optimizer: Optimizer) -> None:
        self._synchronizer.before_step(optimizer, f"step {self._clock.step}, rank {self.rank}")
        if self._current is not None:
            self._current.trains = True
        self._clock.applying(id(optimizer))

    # Checkpoints ---------------------------------------------------------------------------------

    def save(self, path: str | Path, *, extra: dict[str, Any] | None = None, keep: int = 2) -> None:
        """Write everything that was prepared, the position in the data and the random state.

        All workers call it; the leader writes. The last `keep` checkpoints stay in the folder.
        """
        begun = time.perf_counter()
        self._synchronizer.before_save()
        try:
            state = resume.gather(
                self._prepared,
                self._group,
                step=self.step,
                epoch=self.epoch,
                extra=extra or {},
                residuals=self._synchronizer.residuals(),
            )
            written = resume.write(Path(path), self._group, state, keep=keep)
        finally:
            self._synchronizer.after_save()
        if written is not None:
            self._recorder.emit(
                CheckpointSaved(
                    t=time.time(),
                    rank=self.rank,
                    path=str(written.path),
                    step=self.step,
                    seconds=time.perf_counter() - begun,
                    size_bytes=written.size_bytes,
                )
            )

    def load(self, path: str | Path, *, required: bool = True) -> dict[str, Any] | None:
        """Go on from the newest usable checkpoint in the folder; returns the `extra` it was saved with.

        A damaged one, or one of another model, is passed over for the one before it, and said so. With
        required=False, a folder without any checkpoint is a fresh start, and None is returned.
        """
        self._synchronizer.settle()
        found = resume.read(Path(path), self._group, self._prepared, required=required)
        if found is None:
            return None
        for name, reason in found.rejected.items():
            self.note(f"checkpoint {name} was passed over: {reason}")
            if self.is_leader:
                _log.warning("checkpoint %s was passed over: %s", name, reason)
        self._first_epoch = resume.restore(self._prepared, self._group, found.state)
        self._synchronizer.loaded()
        self._synchronizer.restore_residuals(found.state.get("codecs", []))
        self._clock.step = found.step
        self._clock.epoch = self._first_epoch
        self._recorder.emit(
            CheckpointLoaded(
                t=time.time(),
                rank=self.rank,
                path=str(found.path),
                step=found.step,
                rejected=found.rejected,
            )
        )
        extra: dict[str, Any] = found.state["extra"]
        return extra

    # The end -------------------------------------------------------------------------------------

    def close(self, cause: str = "") -> None:
        """Leave the run. Called by itself when the script ends."""
        if self._closed:
            return
        self._closed = True
        if cause:
            self._leave(cause)
            return
        try:
            self._synchronizer.settle()
        except EchelonError as error:
            self._leave(f"{type(error).__name__}: {error.message}")
            raise
        self._leave("")

    def _leave(self, cause: str) -> None:
        self._clock.close()
        self._recorder.close()
        if self._meeting is not None:
            self._meeting.announce_departure(cause)
        self._synchronizer.close()
        self._group.close()
        self._synchronizer.closed()
        if self._meeting is not None:
            self._meeting.linger()
        atexit.unregister(self.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"<Session rank {self.rank} of {self.world_size} on {self.node}, pid {os.getpid()}>"


def _counts(count: float, total: float, rank: int) -> float:
    """A worker's number of targets, if that is one."""
    if not count > 0 or not total > 0:
        raise ConfigError(
            f"weigh({count:g}) leaves rank {rank} without weight",
            where="session.weigh",
            fix="give the number of targets that count, at least one",
        )
    return float(count)


def _refuse(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"parameter {name} has no shape yet",
                where="prepare",
                fix="run one batch through the model first",
            )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"layer {name} makes sparse gradients, which cannot be reduced yet",
                where="prepare",
                fix="build it with sparse=False",
            )
