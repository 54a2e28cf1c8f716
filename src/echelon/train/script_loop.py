"""What happens in a session while the script's loop runs: at an epoch, a pass, a batch, a step?

The session inherits this. Loaders and optimizers call it when the loop gets to them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from echelon.errors import ConfigError
from echelon.observe.events import EpochEnded
from echelon.plan.shares import Slice
from echelon.train.batches import HandedBatch
from echelon.train.drawn import DrawnBatch
from echelon.train.left_loop import when_unwound
from echelon.train.loader import SharedLoader
from echelon.train.memory_watch import MemoryWatch
from echelon.train.script_layout import ScriptLayout
from echelon.verify.replica_choice import Consensus, Validate


class ScriptLoop(ScriptLayout):
    """The session's part in the loop; the session sets what is declared here."""

    _memory: MemoryWatch
    _current: SharedLoader | None
    _share: int

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
            again = loader.draws_again
            self._changes.drawn.drew(DrawnBatch(loader.index, part.positions, part.parts, again))
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


def _counts(count: float, total: float, rank: int) -> float:
    """A worker's number of targets; refuses a number that gives it no weight."""
    if not count > 0 or not total > 0:
        raise ConfigError(
            f"weigh({count:g}) leaves rank {rank} without weight",
            where="session.weigh",
            fix="give the number of targets that count, at least one",
        )
    return float(count)
