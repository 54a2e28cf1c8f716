"""How workers find a checkpoint that fits what the script has prepared, also without a common disk.

Only the leader reads files; the other workers receive what it read. A failure on the leader raises the same
error on every worker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch.optim import Optimizer

from echelon.checkpoint import state_tree
from echelon.checkpoint import store as checkpoint
from echelon.comm.group import Group
from echelon.errors import CheckpointError
from echelon.train.run_state import Prepared

T = TypeVar("T")


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
            "workers": list(found.workers),
        }
        return state_tree.pack(whole)

    data = group.broadcast_bytes(on_leader(group, act) or b"")
    if not data:
        return None
    whole = state_tree.unpack(data)
    return checkpoint.Found(
        path=Path(whole["path"]),
        step=whole["step"],
        state=whole["state"],
        workers=whole["workers"],
        rejected=whole["rejected"],
    )


def on_leader(group: Group, act: Callable[[], T]) -> T | None:
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
