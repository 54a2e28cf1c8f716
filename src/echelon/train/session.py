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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, NoReturn, TypeVar, Unpack, get_args, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from echelon.cluster.allowance import allowance
from echelon.comm.group import Group
from echelon.comm.meet.links import Links
from echelon.comm.meet.rendezvous import Rendezvous
from echelon.comm.memory.rails import machines
from echelon.config.choices import FactorRule, Overlap, check_word
from echelon.errors import ConfigError, EchelonError, WorkerError
from echelon.membership.survival import SurvivorView
from echelon.observe.events import EpochEnded
from echelon.observe.readiness import WorkerPhase, tell
from echelon.observe.run_folder import RunFolder
from echelon.parallel.layout import is_auto
from echelon.plan.plan import Plan
from echelon.plan.shares import ShareTable, Slice
from echelon.train import consistency, run_state
from echelon.train.arranging import Arranger, arranges, gradient_bytes
from echelon.train.auto_shares import AutoShares
from echelon.train.batches import HandedBatch
from echelon.train.change_calls import ChangeCalls, MembersChange
from echelon.train.changes import MemberChanges
from echelon.train.checkpoint_writer import CheckpointWriter
from echelon.train.checks import alone, check_layout
from echelon.train.clock import StepClock
from echelon.train.collectives import ScriptCollectives
from echelon.train.coming_back import ComingBack
from echelon.train.drawn import DrawnBatch
from echelon.train.families.choose import choose, spread_out
from echelon.train.families.synchronizer import ModelOptions, Synchronizer
from echelon.train.guard import Guard, Surroundings
from echelon.train.layout_pick import auto_job, picked, predicted_event, said
from echelon.train.leaving import LeaveSignal
from echelon.train.left_loop import when_unwound
from echelon.train.loader import BatchMeaning, SharedLoader, Sharing
from echelon.train.memory_room import MemoryRoom
from echelon.train.memory_watch import MemoryWatch
from echelon.train.own_cycles import OwnCycles
from echelon.train.preparable import Preparable, PrepareOptions, refuse_model
from echelon.train.profiling import JobProfiling, ProfiledRun
from echelon.train.record import RunRecord
from echelon.train.script_checkpoints import ScriptCheckpoints
from echelon.train.script_log import ScriptLog
from echelon.train.verifying import make_verifier, refuse_preparing, weights_of_shards
from echelon.train.weighing import LossWeights
from echelon.verify.replica_choice import Consensus, Validate

A = TypeVar("A", bound=Preparable)
B = TypeVar("B", bound=Preparable)
C = TypeVar("C", bound=Preparable)
D = TypeVar("D", bound=Preparable)
_log = logging.getLogger(__name__)


class Session(ScriptCheckpoints):
    """One worker's part in a run. `echelon.join` makes it.

    folder  the run's folder; None if nothing is recorded
    device  the device that models and batches are moved to

    A session ends with the script. As a context manager it ends with its block:

        with echelon.join() as session:
            model, optimizer, loader = session.prepare(model, optimizer, loader)
    """

    folder: RunFolder | None
    device: torch.device

    def __init__(
        self,
        group: Group,
        rendezvous: Rendezvous | None,
        plan: Plan,
        clock: StepClock,
        record: RunRecord,
        device: torch.device,
        links: Links | None = None,
    ) -> None:
        ScriptCollectives.__init__(self, group, [worker.node for worker in plan.workers])
        self._changes = group.changes if isinstance(group.changes, MemberChanges) else None
        ScriptLog.__init__(
            self, record, clock, plan, group.rank if self._changes is None else self._changes.slot
        )
        self._first_workers = group.size  # others may join later
        self._change_calls = ChangeCalls()
        self._leave_signal = LeaveSignal()
        self._rendezvous = rendezvous
        self.folder = record.folder
        self.device = device
        self._prepared = run_state.Prepared()
        self._writer = CheckpointWriter(group, self._nodes)
        self._verifier = make_verifier(
            plan,
            group,
            clock,
            record,
            optimizers=self._prepared.optimizers,
            weights=lambda: self._synchronizer.replicas(),
            warn=self.warn,
        )
        self._copies = self._verifier.copies
        self._synchronizer: Synchronizer = choose(
            plan,
            group,
            clock,
            links,
            self.explain,
            inspector=self._verifier if self._verifier.in_rounds else None,
            copies=self._copies,
        )
        self._sharing: Sharing | None = None
        self._shares = ShareTable(weights_of_shards(plan.weights[: self._first_workers], self._copies))
        self._auto_shares: AutoShares | None = None
        self._arranger: Arranger | None = None
        self._layout = "data"
        self._links = links
        self._memory = MemoryWatch(
            group, self._nodes, plan.workers[group.rank].memory, record.emit, self.explain
        )
        arranged = self._changes is None and arranges(plan, group, self._synchronizer)
        if links is not None and rendezvous is not None and arranged:
            hosts = machines(rendezvous.members[: group.size])
            self._arranger = Arranger(group, links, hosts, clock, record.emit, self.explain)
        adapts = plan.adapt_shares and group.size > 1 and self._copies == 1
        if adapts and self._synchronizer.meets_every_step:
            self._auto_shares = AutoShares(
                group,
                self._shares,
                self._prepared.loaders,
                clock,
                record.emit,
                self.explain,
                **(self._arranger.callbacks if self._arranger is not None else {}),
                room=MemoryRoom(self._nodes.count(self.node)) if device.type == "cpu" else None,
            )
            clock.on_ended = self._auto_shares.step_ended
            self._synchronizer.carry(self._auto_shares.piggyback)
        self._current: SharedLoader | None = None
        self._coming_back: ComingBack | None = None
        self._cycles = OwnCycles(self._changes, clock) if self._changes is not None else None
        self._share = 0
        self._first_epoch = 0
        self._closed = False
        self._watch_over()
        members = rendezvous.members[: group.size] if rendezvous is not None else []
        if self._changes is not None:
            self._shares.goes_back = True
            self._log_leads &= not self._changes.returns  # meanwhile another one leads
            self._changes.handed = lambda: {one.index: one.batches_handed for one in self._prepared.loaders}
            self._changes.on_change = self._members_changed
            self._coming_back = ComingBack(
                changes=self._changes,
                prepared=self._prepared,
                shares=self._shares,
                clock=clock,
                guard=self._guard,
                seed=plan.seed,
                leads=lambda: self.is_leader,
                saving=lambda: self._by_itself,
                auto_shares=self._auto_shares,
                synchronizer=self._synchronizer,
            )
        seen = ProfiledRun(self, plan, record.folder, members, links, clock, self._prepared.loaders)
        self._profiling = JobProfiling(seen if self.is_leader and group.size > 1 else None)
        self._lay_out(plan.parallel, where="--parallel")

    def _watch_over(self) -> None:
        """Check and weigh what the synchronizer synchronises."""
        self._guard = Guard(
            Surroundings(
                group=self._group,
                view=self._view,
                nodes=self._nodes,
                prepared=self._prepared,
                synchronizer=self._synchronizer,
                rendezvous=self._rendezvous,
                verifier=self._verifier,
                copies=self._copies,
                step=lambda: self._clock.step,
                warn=self.warn,
            )
        )
        self._weights = LossWeights(
            lambda weight, batch: self._synchronizer.weigh(weight / self._copies, batch),
            where=lambda: f"step {self._clock.step}, rank {self.rank}",
            entering=self._entering,
            strange=self._guard.not_finite,
        )
        self._synchronizer.resolve_with(self._weights.resolve)

    def _lay_out(self, text: str, *, where: str) -> None:
        """Spread the models that will be prepared over the workers by this layout."""
        if text == self._layout or is_auto(text) or (self.world_size == 1 and not alone(text, where)):
            return
        layout = check_layout(replace(self._plan, parallel=text), self.world_size, where=where)
        if layout.is_data_only and self._layout == "data":
            return
        if self._prepared.models or self._prepared.loaders or self._layout != "data":
            raise ConfigError(
                f"parallel is {text!r}, but the run has begun with {self._layout!r}",
                where=where,
                fix="give one layout, in the first prepare or in join",
            )
        if self._changes is not None:
            raise ConfigError(
                f"parallel is {text!r}, and a part of the model is lost with its worker",
                where=where,
                fix="leave --min-workers out, or use data parallelism alone",
            )
        self._layout = text
        self._guard.remove()
        self._synchronizer.close()
        self._auto_shares = self._arranger = self._clock.on_ended = None
        self._profiling = JobProfiling(None)
        memory = allowance(self._nodes.count(self.node)).memory_bytes
        spread = spread_out(
            layout,
            self._group,
            self._clock,
            memory_bytes=memory,
            links=self._links,
            compared=self._agree,
            explain=self.explain,
        )
        self._synchronizer, self._view = spread.synchronizer, spread.view
        self._shares = ShareTable(spread.mesh.weights(self._plan.weights))
        self._clock.counts_samples = spread.mesh.stage_of(self.rank) == 0
        self._watch_over()

    @property
    def is_leader(self) -> bool:
        """Whether this worker has rank 0, which prints and writes for all."""
        return self.rank == 0

    @property
    def node(self) -> str:
        """The name of the machine that this worker runs on."""
        return self._nodes[self.rank]

    @property
    def is_left_out(self) -> bool:
        """Whether this worker is left out as too slow (`--leave-out`): then no step of it counts."""
        return self._is_out

    def on_change(self, function: Callable[[MembersChange], object]) -> None:
        """Call a function whenever members have changed: workers were lost, have left, joined or are back.

        function  gets `lost`, `left` and `joined`, and this worker's new `rank`, `world_size` and `step`

        It is called in the training thread, when the loop asks for a batch between two steps, on all
        members alike, so it may exchange values with the others. Without `--min-workers` members never
        change. Call it before `session.epochs`. Example:

            session.on_change(lambda change: session.print(f"{change.world_size} workers go on"))
        """
        self._change_calls.add(function)

    def _members_changed(self, view: SurvivorView) -> None:
        """Workers were lost or are back: the members share what is not drawn yet."""
        self._change_calls.changed(view)
        self._name_nodes(view)
        self._log_leads = self._changes is not None and self._changes.slot == view.members[0]
        first = {one.index: view.handed.get(one.index, 0) for one in self._prepared.loaders}
        self._shares.keep(view.members, first)
        if view.planned:
            self._shares.workers = len(view.members)
        text = self._synchronizer.lost((*view.lost, *view.left))
        if text and self._log_leads:
            self.note(text)
        for loader in self._prepared.loaders:
            loader.changed()

    def _name_nodes(self, view: SurvivorView) -> None:
        planned = self._plan.workers[: self._first_workers]
        self._nodes[:] = [planned[min(slot, len(planned) - 1)].node for slot in view.members]

    @property
    def _comes_back(self) -> bool:
        return self._changes is not None and self._changes.returns

    @property
    def _is_out(self) -> bool:
        return self._changes is not None and self._changes.is_out

    def _unlogged(self) -> AbstractContextManager[None]:
        return self._changes.unlogged() if self._changes is not None else nullcontext()

    # Preparing -----------------------------------------------------------------------------------

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
        for model in models:
            self._synchronizer.add(model, rules)
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

    def _picked_layout(self, things: tuple[Any, ...], rules: ModelOptions, *, per_worker: bool) -> str:
        """The layout that `auto` chooses for what is prepared; later, the one that the run has."""
        if self.world_size == 1 or self._changes is not None or self._prepared.models:
            return self._layout
        job = auto_job(
            things,
            self.world_size,
            per_worker=per_worker,
            local_batchnorm=rules.batchnorm == "local",
        )
        here = self._nodes.count(self.node)
        found = picked(job, self._group, self._plan, self._plan.workers[self.rank].memory, here)
        best, *others = found.costs
        self._plan = replace(self._plan, parallel=best.text)
        if self.is_leader:
            self._record.emit(predicted_event(found))
        self.explain("parallel", said(found), tell=f"parallel auto: {best}" if others else "")
        return best.text

    def _check_memory(self) -> None:
        """Refuse a layout that does not fit; with servers, states are theirs."""
        if self._synchronizer.meets_every_step and not self._synchronizer.claims:
            kept, parts = self._prepared, self._layout != "data"
            self._memory.prepared(kept.models, kept.optimizers, self._layout, parts=parts)

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

    # The loop ------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Iterate over the epochs of the run, from 0 or from where a checkpoint left off.

        count  how many epochs the whole run has

        Example:

            for epoch in session.epochs(10):
                for x, y in loader:
                    ...
        """
        self._continue(counts=True)
        self._begin_epochs()
        for epoch in range(self._first_epoch, count):
            self._clock.epoch = epoch
            if self._coming_back is not None:
                self._coming_back.epoch_begins()
            try:
                yield epoch
            except GeneratorExit:
                when_unwound(self._group.left_loop)
                raise
            if self._is_out:
                raise self._has_left_pass()
            self._synchronizer.settle()
            self._clock.close()
            self._first_epoch = epoch + 1
            self._record.emit(EpochEnded(t=time.time(), rank=self._log_rank, epoch=epoch, step=self.step))
            self._guard.goes_on()
            self._epoch_ended()
        self._synchronizer.finish()
        if self._prepared.models and not self._synchronizer.claims:
            self._agree("the end of the last epoch")
            self._guard.check_weights("the end of the last epoch")

    def _begin_epochs(self) -> None:
        """Where workers may be lost: one that was started again becomes a member here."""
        if self._changes is None or self._coming_back is None:
            return
        self._leave_signal.install()
        if not self._changes.returns:
            self._changes.epochs_begin(min((one.most_workers for one in self._prepared.loaders), default=0))
            return
        view, self._first_epoch = self._coming_back.come_back()
        self._change_calls.changed(view)
        self._name_nodes(view)

    def _batch_asked(self, loader: SharedLoader) -> None:
        """The loop asks for a batch."""
        cycle = self._cycles.ended(loader) if self._cycles is not None else None
        if self._is_out:
            self._asked_alone(loader, cycle)
        else:
            self._asked(loader)
            self._asked_together(loader)
        if self._cycles is not None:
            self._cycles.begins(loader)

    def _asked_alone(self, loader: SharedLoader, cycle: tuple[float, int] | None) -> None:
        """The same, of a worker that is left out: it comes back if its steps are as quick as is normal."""
        assert self._changes is not None
        assert self._coming_back is not None
        if cycle is None or not self._changes.is_well(*cycle):
            return
        view = self._coming_back.go_on_with_the_others()
        self._clock.records = True
        self._change_calls.changed(view)
        self._name_nodes(view)
        self._log_leads = self.is_leader
        self._tell_changes()

    def _tell_changes(self) -> None:
        """Call the script's functions for changes that are due here."""
        assert self._changes is not None
        if self._changes.drawn.empty and not self._changes.is_catching_up:
            self._change_calls.call(
                self._changes.operation, rank=self.rank, world_size=self.world_size, step=self.step
            )

    def _has_left_pass(self) -> WorkerError:
        """The error of a worker that was left out, and whose script has not stayed in the pass."""
        return WorkerError(
            "this worker was left out, and its script has left the pass over the data",
            where=f"rank {self._log_rank}",
            fix="nothing is to be done: it is started again",
        )

    def _asked_together(self, loader: SharedLoader) -> None:
        if self._coming_back is None or self._changes is None:
            return
        self._changes.progress.goes_on()
        if self._leave_signal.received:
            self._leave_signal.remove()
            refusal = self._changes.ask_to_leave()
            if refusal:
                self.warn(f"SIGTERM: {refusal}; training goes on, and another SIGTERM ends this worker")
        self._coming_back.asked(loader)
        if self._changes.has_left:
            self._end_here()
        if self._changes.is_out:
            self._log_leads = self._clock.records = False
            return
        self._tell_changes()

    @contextmanager
    def accumulate(self, active: bool = True) -> Iterator[None]:
        """Keep the gradients of the block on this worker; the next backward pass outside reduces them too.

        active  False makes the block an ordinary one

        Example, with gradients accumulated over several parts of a batch:

            for index, (x, y) in enumerate(parts):
                with session.accumulate(index < len(parts) - 1):
                    (loss_fn(model(x), y) / len(parts)).backward()
            optimizer.step()
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
        """Set the weight of this worker's loss to the number of targets that the loss is a mean over.

        count  how many targets count on this worker, at least one

        Gradients are weighted by each worker's number of samples. That is wrong where a loss is a mean over
        fewer or more targets than samples, such as tokens without padding. Call it before `backward()`, on
        all workers or on none. Example:

            session.weigh(int((targets != padding).sum()))
            loss.backward()
        """
        if self._synchronizer.claims:  # workers step at different times, so there is no common total
            self._synchronizer.weigh(_counts(count, count, self.rank))
            self._weights.tell()
            return
        self._agree("weigh")
        total = torch.tensor([float(count)], dtype=torch.float64)
        self._group.all_reduce(total).wait()
        self._synchronizer.weigh(_counts(count, float(total), self.rank) / float(total))
        self._weights.tell()

    def compare_replicas(
        self, consensus: Consensus | None = None, validate: Validate | None = None
    ) -> None:
        """With `verify="replicate(n)"`: let the script's functions decide where replicas' gradients differ.

        consensus  gets every replica's gradients, by parameter name; returns the indices of those that pass
        validate   gets the same and those indices, if several pass; returns the index of the one to use

        Without `consensus` all pass, without `validate` the first that passes is used. Call it before
        training, on all workers alike. Example, for replicas that differ by rounding:

            def close(replicas):
                middle = replicas[len(replicas) // 2]
                return [i for i, one in enumerate(replicas)
                        if all(torch.allclose(one[name], middle[name]) for name in middle)]

            session.compare_replicas(consensus=close)
        """
        self._verifier.decide_by(consensus, validate)

    def pause(self) -> None:
        """Tell the servers not to wait for this worker until its next pass over the data.

        Needed only if the sync policy lets workers take different numbers of steps and the script reads
        data of its own. A prepared loader does it when a loop over it ends. Example:

            for batch in my_stream:
                train_on(batch)
            session.pause()
            evaluate(model)
        """
        self._synchronizer.depart()

    def _claim(self, what: str, count: int) -> int:
        """Add to a counter that all workers share; returns its value before."""
        assert self._rendezvous is not None
        store = self._rendezvous.store

        def ticket() -> int:
            return int(store.add(f"claim/{what}", count)) - count

        return self._synchronizer.claim(ticket) if count else ticket()

    def _on_pass(self, loader: SharedLoader) -> None:
        if not loader.finished and self._changes is not None and self._prepared.models:
            self._changes.ready()
        if not loader.finished and self._coming_back is not None:
            self._coming_back.pass_begins(loader)
        if not loader.finished:
            purpose = "training" if self._weights.trains else "evaluation"
            self._agree(f"pass {loader.pass_index} over loader {loader.index}, for {purpose}")
            self._guard.pass_begins(loader)
            self._weights.pass_begins(loader.index)
        self._synchronizer.refresh(ended=loader.finished, trains=loader.trains)
        if loader.finished:
            self._guard.pass_ended(loader, evaluated=not self._weights.trains)

    def _drained(self, loader: SharedLoader) -> list[int]:
        """A pass has no batches left; the positions that are to be drawn again."""
        assert self._changes is not None
        self._agree(f"the end of pass {loader.pass_index} over loader {loader.index}")
        return self._changes.drawn.take(loader.index, self._changes.members)

    def _on_batch(self, loader: SharedLoader, part: Slice, data: Any) -> None:
        self._current = loader
        self._share = part.share
        if self._changes is not None and part.positions is not None and not self._is_out:
            self._changes.drawn.drew(DrawnBatch(loader.index, part.positions, part.parts))
        if self.world_size == 1 and self._changes is None:
            return
        if self._weights.trains:
            loader.draws_to_train = True
            if self._changes is not None:
                self._changes.progress.computes()
            self._guard.goes_on()
        if self._auto_shares is not None and not self._is_out:
            self._auto_shares.drew(part.batch, part.share)
        parts = (part.share,) if self._synchronizer.claims else part.parts
        batch = HandedBatch(loader=loader.index, share=part.share, batch=part.batch, parts=parts)
        self._weights.drew(batch, data)

    def _entering(self, model: nn.Module, given: tuple[Any, ...]) -> None:
        self._guard.forward()
        self._profiling.called(model, given)

    @property
    def _shards(self) -> int:
        return self.world_size // self._copies

    def _samples(self) -> float:
        loader = self._current
        if loader is None:
            return 1.0
        return float(loader.share_drawn if loader.finished else self._share)

    def _exchange(self) -> AbstractContextManager[None]:
        return self._clock.exchange(begins_step=False)

    def _combined(self) -> None:
        self._guard.combined()
        if self._prepared.models:
            self._clock.begun()

    def _before_step(self, optimizer: Optimizer) -> None:
        self._writer.await_copied()
        if self._synchronizer.claims:
            self._weights.stepping()
        self._synchronizer.before_step(optimizer, f"step {self._clock.step}, rank {self.rank}")
        self._verifier.stepping(optimizer)
        if self._auto_shares is not None and not self._is_out:
            self._auto_shares.stepping(self._group.names)
        self._guard.stepping(optimizer)
        if self._current is not None:
            self._current.trains = True
        self._clock.applying(id(optimizer))

    def _after_step(self, optimizer: Optimizer) -> None:
        step = self._clock.step
        self._clock.applied(id(optimizer))
        self._verifier.stepped_one()
        if self._clock.step > step:
            self._verifier.stepped(self._clock.step)
            self._memory.stepped()
        if self._auto_shares is not None and self._clock.step > step and not self._is_out:
            self._auto_shares.stepped()

    # The end -------------------------------------------------------------------------------------

    def close(self, cause: str = "") -> None:
        """Leave the run. Called by itself when the script or the `with` block ends.

        cause  why the script failed, for the other workers and the record; empty if it did not
        """
        if self._closed:
            return
        self._closed = True
        if self._by_itself is not None:
            self._by_itself.signal.remove()
        self._writer.close(failed=bool(cause))
        self._report_saved()
        self._guard.remove()
        self._verifier.remove()
        self._profiling.end()
        self._memory.end(self.rank)
        if cause:
            self._leave(cause)
            return
        self._guard.close()
        try:
            self._synchronizer.settle()
        except EchelonError as error:
            self._leave(f"{type(error).__name__}: {error.message}")
            raise
        self._leave("")

    def _end_here(self) -> NoReturn:
        """This worker has left the run between two steps: nothing of the script comes after its loop."""
        text = f"rank {self._log_rank} has left the run after {self.step} steps: its script ends here"
        _log.warning(text, extra={"is_noted": True})  # the launcher tells the user
        self._closed = True
        if self._by_itself is not None:
            self._by_itself.signal.remove()
        self._writer.close(failed=False)
        self._guard.remove()
        self._verifier.remove()
        self._profiling.end()
        self._leave("")
        raise SystemExit(0)

    def _leave(self, cause: str) -> None:
        self._leave_signal.remove()
        self._clock.close()
        totals = self._verifier.totals()
        if totals is not None and self.is_leader:
            self._record.emit(totals)
        self._record.flush()
        try:
            if self._changes is not None:
                self._changes.left(failed=bool(cause))
            if self._rendezvous is not None:
                self._rendezvous.announce_departure(cause)
            self._synchronizer.close()
            self._weights.detach()
            self._group.close()
            self._synchronizer.closed()
            if self._rendezvous is not None:
                self._rendezvous.linger()
        finally:
            tell(WorkerPhase.LEFT)
            self._record.end(cause)  # last: by now the other workers have written their events
            atexit.unregister(self.close)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = error is None or (isinstance(error, SystemExit) and not error.code)
        self.close("" if ended else f"{type(error).__name__}: {error}")

    def __repr__(self) -> str:
        return f"<Session rank {self.rank} of {self.world_size} on {self.node}, pid {os.getpid()}>"


def _counts(count: float, total: float, rank: int) -> float:
    """A worker's number of targets; refuses a number that gives it no weight."""
    if not count > 0 or not total > 0:
        raise ConfigError(
            f"weigh({count:g}) leaves rank {rank} without weight",
            where="session.weigh",
            fix="give the number of targets that count, at least one",
        )
    return float(count)
