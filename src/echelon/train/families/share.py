"""All workers of a machine update the same weights, without locks (hogwild).

The parameters move to memory that all workers map. Each worker computes and applies its own gradients
with its own optimizer; of two writes at the same time, one may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.comm.group import Group
from echelon.train.families.mix import Observer
from echelon.train.families.synchronizer import Explain, IndependentSynchronizer, ModelOptions, Overlap

_ALIGN_BYTES = 64


class ShareSynchronizer(IndependentSynchronizer):
    """One worker's part in hogwild."""

    claims = True

    def __init__(self, group: Group, observer: Observer, *, explain: Explain) -> None:
        super().__init__(group, "hogwild", explain)
        self._observer = observer
        self._handles: list[Callable[[], None]] = []
        self._optimizers: list[Optimizer] = []

    def add(self, model: nn.Module, rules: ModelOptions) -> None:
        """Move the parameters to memory that the first worker creates and all workers map."""
        super().add(model, rules)
        parameters = list(model.parameters())
        places, size_bytes = _places(parameters)
        memory = self._group.shared_memory(size_bytes)
        for p, at in zip(parameters, places, strict=True):
            length = p.numel() * p.element_size()
            view = memory[at : at + length].view(p.dtype).view(p.shape)
            if self._group.rank == 0:
                view.copy_(p.detach())
            p.data = view
            if p.requires_grad:
                handle = p.register_post_accumulate_grad_hook(lambda _: self._observer.computing())
                self._handles.append(handle.remove)
        self._group.barrier()

    def adopt(
        self, optimizer: Optimizer, overlap: Overlap, before: Callable[[], None], after: Callable[[], None]
    ) -> None:
        """Call `before` and `after` around the optimizer's own steps."""
        self._optimizers.append(optimizer)
        self._handles.append(optimizer.register_step_pre_hook(lambda *_: before()).remove)
        self._handles.append(optimizer.register_step_post_hook(lambda *_: after()).remove)

    def refresh(self, *, ended: bool, trains: bool) -> None:
        """Wait until no worker writes."""
        self._group.barrier()
        self._share_buffers()

    def before_save(self) -> None:
        """Wait until no worker writes, since the leader reads now."""
        self._group.barrier()

    def after_save(self) -> None:
        """Nobody writes before the leader has read."""
        self._group.barrier()

    def own_state(self) -> dict[str, Any]:
        """The states of this worker's optimizers."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self._optimizers]}

    def restore_own(self, states: Sequence[dict[str, Any]]) -> None:
        """Load them, if there are as many workers as there were."""
        if len(states) == self._group.size and "optimizers" in states[self._group.rank]:
            saved = states[self._group.rank]["optimizers"]
            for optimizer, state in zip(self._optimizers, saved, strict=True):
                optimizer.load_state_dict(state)

    def loaded(self) -> None:
        """Wait until every worker has written the loaded weights."""
        self._group.barrier()

    @torch.no_grad()
    def close(self) -> None:
        """Give this worker weights of its own again, and remove the hooks."""
        for model in self._models:
            for p in model.parameters():
                p.data = p.detach().clone()
        while self._handles:
            self._handles.pop()()


def _places(parameters: list[nn.Parameter]) -> tuple[list[int], int]:
    """The offset of each parameter, and the total size, in bytes."""
    places: list[int] = []
    at = 0
    for p in parameters:
        places.append(at)
        length = _bytes(p)
        at += length + -length % _ALIGN_BYTES
    return places, max(at, _ALIGN_BYTES)


def _bytes(p: Tensor) -> int:
    return p.numel() * p.element_size()
