"""The whole state of a run as a tree: what a run needs to go on as if it had never stopped.

`collect` makes the tree, `restore` puts one back. Neither knows where it is kept: `checkpoint_writer.py`
writes it to disk in parts, and it may as well be sent to a worker.

    common  models and optimizers, which all workers have, or the leader alone (`same_on_all`)
    lead    what the leader knows for all: step, epoch, schedulers, positions in the data, shares, `extra`
    own     what only this worker has: random streams, codec residuals, the sync policy's state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.checkpoint.store import Found
from echelon.plan.shares import ShareTable
from echelon.train import streams
from echelon.train.families.synchronizer import Synchronizer
from echelon.train.loader import SharedLoader


@dataclass(slots=True)
class Prepared:
    """All that was given to `session.prepare`, in that order."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    loaders: list[SharedLoader] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """One worker's view of a run's state. Tensors are the live ones.

    `same_on_all`: every worker has `common`. `changing` are the addresses of tensors in `common` that may
    change before the next step of an optimizer: the buffers of models.
    """

    step: int
    common: dict[str, Any]
    lead: dict[str, Any]
    own: dict[str, Any]
    same_on_all: bool
    changing: frozenset[int] = frozenset()


def own_part(synchronizer: Synchronizer) -> dict[str, Any]:
    """What only this worker has; called before the synchronizer shows weights to save."""
    return {
        "random": streams.random_state(),
        "codec": synchronizer.residuals(),
        "policy": synchronizer.own_state(),
    }


def collect(
    prepared: Prepared,
    synchronizer: Synchronizer,
    shares: ShareTable,
    own: dict[str, Any],
    *,
    step: int,
    epoch: int,
    extra: dict[str, Any],
) -> RunState:
    """The run's state as this worker sees it, between the synchronizer's `before_save` and `after_save`."""
    buffers = [buffer.data_ptr() for model in prepared.models for buffer in model.buffers()]
    handed = {loader.index: loader.batches_handed for loader in prepared.loaders}
    return RunState(
        step=step,
        common={
            "models": [model.state_dict() for model in prepared.models],
            "optimizers": [optimizer.state_dict() for optimizer in prepared.optimizers],
        },
        lead={
            "step": step,
            "epoch": epoch,
            "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
            "loaders": [loader.state() for loader in prepared.loaders],
            "shares": shares.state(handed),
            "extra": extra,
        },
        own=own,
        same_on_all=synchronizer.same_on_all,
        changing=frozenset(buffers),
    )


def restore(
    prepared: Prepared, synchronizer: Synchronizer, shares: ShareTable, rank: int, size: int, found: Found
) -> int:
    """Restore everything; returns the epoch to continue with. All workers call this."""
    state = found.state
    for model, saved in zip(prepared.models, state["models"], strict=True):
        model.load_state_dict(saved)
    for optimizer, saved in zip(prepared.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    for loader, saved in zip(prepared.loaders, state["loaders"], strict=True):
        loader.restore(saved)
    workers = _workers(found)
    synchronizer.loaded()
    synchronizer.restore_residuals([worker["codec"] for worker in workers])
    synchronizer.restore_own([worker["policy"] for worker in workers])
    if len(workers) == size:
        _restore_shares(prepared, shares, state)
        streams.set_random_state(workers[rank]["random"])
    return int(state["epoch"]) + _epoch_is_over(state["loaders"])


def _workers(found: Found) -> Sequence[dict[str, Any]]:
    """Each worker's own state; a checkpoint of format 1 has less of it."""
    if found.workers:
        return found.workers
    codecs = found.state.get("codecs", [])
    return [
        {"random": stream, "codec": codecs[rank] if rank < len(codecs) else {}, "policy": {}}
        for rank, stream in enumerate(found.state.get("random", []))
    ]


def _restore_shares(prepared: Prepared, shares: ShareTable, state: dict[str, Any]) -> None:
    saved = state.get("shares")
    if saved is not None and len(saved["weights"]) == len(shares.weights):
        shares.restore(saved, {loader.index: loader.batches_drawn for loader in prepared.loaders})


def _epoch_is_over(loaders: list[dict[str, Any]]) -> bool:
    """Whether the checkpoint was written after the last batch of its epoch."""
    training = [loader for loader in loaders if loader["trains"]]
    return bool(training) and all(loader["finished"] for loader in training)
