"""How does `torch.nn.utils.clip_grad_norm_` find the norm over the whole model, if a worker holds a part?

Torch computes the norm of the gradients it is given; here these are the worker's own. While a model is
spread over workers, the function that it does so with is replaced: gradients that other workers hold are
added, and those that several hold are counted once. A worker that holds none of them takes part with
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from echelon.comm.group import Group


class WholeNorms:
    """Replaces torch's norm; `held` and `counted` are this worker's gradients now, and those it counts."""

    def __init__(
        self,
        group: Group,
        held: Callable[[], list[Tensor]],
        counted: Callable[[], list[Tensor]],
    ) -> None:
        self._group = group
        self._held = held
        self._counted = counted
        self._own: Any = clip_grad._get_total_norm

    def install(self) -> None:
        """From now on norms are of the whole model."""

        def total(
            tensors: Tensor | Iterable[Tensor],
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Tensor:
            given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            held = {id(one) for one in self._held()}
            if given and not any(id(one) in held for one in given):
                found: Tensor = self._own(given, norm_type, error_if_nonfinite, foreach)
                return found  # of a model that is not spread
            counted = {id(one) for one in self._counted()}
            mine = [one for one in given if id(one) in counted or id(one) not in held]
            whole = self._combined(mine, float(norm_type))
            if error_if_nonfinite and not math.isfinite(float(whole)):
                raise RuntimeError(f"The total norm of order {norm_type} of all gradients is not finite")
            return whole.to(given[0].dtype) if given else whole

        total.echelon = self  # type: ignore[attr-defined]
        clip_grad._get_total_norm = total

    def remove(self) -> None:
        """Put torch's own function back, if nobody else has replaced it since."""
        if getattr(clip_grad._get_total_norm, "echelon", None) is self:
            clip_grad._get_total_norm = self._own

    def _combined(self, gradients: list[Tensor], order: float) -> Tensor:
        if math.isinf(order):
            most = torch.stack(
                [one.abs().max().double() for one in gradients] or [torch.zeros(()).double()]
            )
            whole = most.max().reshape(1)
            self._group.all_reduce(whole, "max").wait()
            return whole[0]
        powers = [one.double().abs().pow(order).sum() for one in gradients]
        total = torch.stack(powers or [torch.zeros(()).double()]).sum().reshape(1)
        self._group.all_reduce(total).wait()
        return total[0].pow(1.0 / order)
