"""The state that a run needs to resume as if it had never stopped, and how it is restored.

Only the leader reads and writes files. The other workers send it their random states and receive the rest,
so no shared file system is needed. A failure on the leader raises the same error on every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from echelon.checkpoint import state_tree
from echelon.checkpoint import store as checkpoint
from echelon.comm.group import Group
from echelon.errors import CheckpointError
from echelon.train import streams
from echelon.train.loader import SharedLoader

T = TypeVar("T")


@dataclass(slots=True)
class Prepared:
    """All that was given to `session.prepare`, in that order."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    loaders: list[SharedLoader] = field(default_factory=list)
    schedulers: list[LRScheduler] = field(default_factory=list)


def gather(
    prepared: Prepared,
    group: Group,
    *,
    step: int,
    epoch: int,
    extra: dict[str, Any],
    residuals: dict[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The state of the whole run, on the leader; None elsewhere. `residuals` are this worker's."""
    packed = _to_leader(group, state_tree.pack({"random": streams.random_state(), "owed": residuals or {}}))
    if group.rank != 0:
        return None
    told = [state_tree.unpack(data) for data in packed]
    return {
        "step": step,
        "epoch": epoch,
        "models": [model.state_dict() for model in prepared.models],
        "optimizers": [optimizer.state_dict() for optimizer in prepared.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in prepared.schedulers],
        "loaders": [loader.state() for loader in prepared.loaders],
        "random": [one["random"] for one in told],
        "codecs": [one["owed"] for one in told],
        "extra": extra,
    }


def _to_leader(group: Group, mine: bytes) -> list[bytes]:
    """All workers' bytes, on the leader; the other workers receive nothing."""
    own, nothing = torch.frombuffer(bytearray(mine), dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)
    exchanged = group.all_to_all([own if rank == 0 else nothing for rank in range(group.size)])
    parts = exchanged.received.wait()
    parts[group.rank] = own
    return [bytes(part.numpy()) for part in parts]


def write(
    root: Path, group: Group, state: dict[str, Any] | None, *, keep: int
) -> checkpoint.Written | None:
    """Write on the leader, which returns what was written. A failure raises on all workers."""

    def act() -> checkpoint.Written:
        assert state is not None
        return checkpoint.write(root, state["step"], state, keep=keep)

    return _on_leader(group, act)


def read(root: Path, group: Group, prepared: Prepared, *, required: bool) -> checkpoint.Found | None:
    """The newest checkpoint that fits what was prepared, on every worker."""

    def act() -> bytes:
        if not required and not checkpoint.exists(root):
            return b""
        found = checkpoint.read_newest(root, lambda state: _misfit(prepared, state))
        whole = {
            "path": str(found.path),
            "step": found.step,
            "rejected": found.rejected,
            "state": found.state,
        }
        return state_tree.pack(whole)

    data = group.broadcast_bytes(_on_leader(group, act) or b"")
    if not data:
        return None
    whole = state_tree.unpack(data)
    return checkpoint.Found(
        path=Path(whole["path"]), step=whole["step"], state=whole["state"], rejected=whole["rejected"]
    )


def restore(prepared: Prepared, group: Group, state: dict[str, Any]) -> int:
    """Restore everything; returns the epoch to continue with."""
    for model, saved in zip(prepared.models, state["models"], strict=True):
        model.load_state_dict(saved)
    for optimizer, saved in zip(prepared.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    for scheduler, saved in zip(prepared.schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(saved)
    for loader, saved in zip(prepared.loaders, state["loaders"], strict=True):
        loader.restore(saved)
    if len(state["random"]) == group.size:
        streams.set_random_state(state["random"][group.rank])
    return int(state["epoch"]) + _epoch_is_over(state["loaders"])


def _epoch_is_over(loaders: list[dict[str, Any]]) -> bool:
    """Whether the checkpoint was written after the last batch of its epoch."""
    training = [loader for loader in loaders if loader["trains"]]
    return bool(training) and all(loader["finished"] for loader in training)


def _misfit(prepared: Prepared, state: dict[str, Any]) -> str | None:
    """Why a checkpoint does not fit the prepared objects; None if it fits."""
    for kind in ("models", "optimizers", "schedulers", "loaders"):
        have, saved = len(getattr(prepared, kind)), len(state[kind])
        if have != saved:
            return f"it has {saved} {kind}, the script prepared {have}"
    for model, saved in zip(prepared.models, state["models"], strict=True):
        own = model.state_dict()
        for name, value in own.items():
            if name not in saved:
                return f"it is of another model: it has no {name}"
            if isinstance(value, torch.Tensor) and saved[name].shape != value.shape:
                shapes = f"{list(saved[name].shape)}, the script's is {list(value.shape)}"
                return f"it is of another model: its {name} is {shapes}"
        unknown = [name for name in saved if name not in own]
        if unknown:
            return f"it is of another model: the script's has no {unknown[0]}"
    for optimizer, saved in zip(prepared.optimizers, state["optimizers"], strict=True):
        reason = _optimizer_misfit(optimizer, saved["param_groups"])
        if reason is not None:
            return f"it is of another optimizer: {reason}"
    return None


def _optimizer_misfit(optimizer: Optimizer, saved: list[dict[str, Any]]) -> str | None:
    have = [len(group["params"]) for group in optimizer.param_groups]
    had = [len(group["params"]) for group in saved]
    if have != had:
        return f"its groups have {had} parameters, the script's {have}"
    return next((f"it has no {name}" for name in optimizer.defaults if name not in saved[0]), None)


def _on_leader(group: Group, act: Callable[[], T]) -> T | None:
    """Call `act` on the leader; if it fails there, every worker raises the same error."""
    result: T | None = None
    told: dict[str, str] = {}
    if group.rank == 0:
        try:
            result = act()
        except CheckpointError as error:
            told = {"message": error.message, "where": error.where, "fix": error.fix}
    told = msgspec.json.decode(group.broadcast_bytes(msgspec.json.encode(told)), type=dict[str, str])
    if told:
        raise CheckpointError(told["message"], where=told["where"], fix=told["fix"])
    return result
