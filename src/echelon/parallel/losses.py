"""Which losses can be computed micro-batch by micro-batch, with the same result as over the batch?

Sums can, and means whose denominator is known before: over the elements, or over the weights of the
targets that are not ignored. A micro-batch's part is its sum over the denominator of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from echelon.parallel.micro import part_of

_BY_TARGETS = {functional.cross_entropy, functional.nll_loss}
_BY_ELEMENTS = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
}


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """A loss of a batch of `rows` samples, computed in parts.

    `options` are its other arguments; `shaped` is what the script does to the output before.
    """

    function: Callable[..., Tensor]
    target: Tensor
    options: dict[str, Any]
    rows: int
    shaped: Callable[[Tensor], Tensor] = lambda output: output

    def part(self, output: Tensor, edge: tuple[int, int]) -> Tensor:
        """What the samples of a micro-batch add to the loss."""
        output = self.shaped(output)
        target = part_of(self.target, self.rows, edge)
        options = {**self.options, "reduction": "sum"}
        total: Tensor = self.function(output, target, **options)
        if self.options.get("reduction", "mean") == "sum":
            return total
        return total / self._denominator(output, edge)

    def _denominator(self, output: Tensor, edge: tuple[int, int]) -> Tensor | float:
        elements = output.numel() // (edge[1] - edge[0]) * self.rows
        if self.function not in _BY_TARGETS:
            return float(elements)
        if self.target.is_floating_point():  # a probability for each class
            return elements / output.shape[1]
        counted = self.target[self.target != self.options.get("ignore_index", -100)]
        weight = self.options.get("weight")
        return float(counted.numel()) if weight is None else weight[counted].sum()


def micro_loss(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int) -> MicroLoss | None:
    """The loss that a call computes from the model's output; None if it must be computed at once."""
    if function not in _BY_TARGETS and function not in _BY_ELEMENTS:
        return None
    names = ("input", "target", "weight") if function in _BY_TARGETS else ("input", "target")
    if len(args) > len(names):
        return None
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given.pop("input", None)
    target = given.pop("target", None)
    old = ("size_average", "reduce", "weight" if function in _BY_ELEMENTS else "reduce")
    if any(given.get(name) is not None for name in old):
        return None
    if given.get("reduction", "mean") not in ("mean", "sum"):
        return None
    if not isinstance(target, Tensor) or not target.dim() or target.shape[0] % rows or target.requires_grad:
        return None
    plain = (torch.Tensor, torch.nn.Parameter)
    if any(isinstance(one, Tensor) and type(one) not in plain for one in (target, *given.values())):
        return None
    return MicroLoss(function, target, {k: v for k, v in given.items() if v is not None}, rows)
