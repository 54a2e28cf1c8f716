"""Batch normalisation over the global batch, so that N workers normalise as one process would.

Mean and variance come from all workers' samples. In backward, the two sums that every sample's gradient
depends on are also reduced over all workers. Workers may hold different numbers of samples: the loss is
sum_i w_i L_i, so worker i's output gradients enter those sums with weight w_i.

Each layer costs one small reduction in forward and one in backward. `prepare(batchnorm="local")` does as
DDP does: statistics of the worker's own share, and the leader's running statistics for all.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.group import Group


class _Normalise(torch.autograd.Function):
    """Normalises with statistics over all workers' samples; returns the output and the statistics."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, group: Group, weight_of: Callable[[], float]
    ) -> _Normalised:
        axes = [axis for axis in range(x.dim()) if axis != 1]
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        own = x.to(wide)
        count = torch.full((1,), x.numel() // x.size(1), dtype=wide, device=x.device)
        mean_own = own.mean(axes) if int(count) else own.new_zeros(x.size(1))
        # Squares about the worker's own mean: about zero, large means would cancel the difference.
        spread = (own - _along(mean_own, x)).square().sum(axes)
        parts = group.all_gather(torch.cat([count, mean_own, spread]))
        counts = torch.stack([part[0] for part in parts])
        means = torch.stack([part[1 : 1 + x.size(1)] for part in parts])
        spreads = torch.stack([part[1 + x.size(1) :] for part in parts])
        total = counts.sum()
        mean = (counts[:, None] * means).sum(0) / total
        variance = (spreads.sum(0) + (counts[:, None] * (means - mean).square()).sum(0)) / total
        scale = torch.rsqrt(variance + eps)
        out = ((own - _along(mean, x)) * _along(scale, x)).to(x.dtype)
        ctx.save_for_backward(out, scale, total)
        ctx.group, ctx.weight_of, ctx.axes = group, weight_of, axes
        ctx.mark_non_differentiable(mean, variance, total)
        return out, mean, variance, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        out, scale, total = ctx.saved_tensors
        wide = grads[0].to(scale.dtype)
        normalised = out.to(scale.dtype)
        weight = ctx.weight_of()
        sums = torch.cat([wide.sum(ctx.axes), (wide * normalised).sum(ctx.axes)]).mul_(weight)
        ctx.group.all_reduce(sums).wait()
        mean_grad, mean_grad_out = (sums / (total * weight)).chunk(2)
        inner = wide - _along(mean_grad, out) - normalised * _along(mean_grad_out, out)
        return (inner * _along(scale, out)).to(out.dtype), None, None, None


_Normalised = tuple[Tensor, Tensor, Tensor, Tensor]


def _normalise(x: Tensor, eps: float, group: Group, weight_of: Callable[[], float]) -> _Normalised:
    """Normalise outside of torch.compile, which would trace the waits for other workers."""
    compiler = "torch._dynamo" in sys.modules  # slow to import, and loaded if anything is compiled
    apply = _untraced() if compiler else _Normalise.apply
    return cast(_Normalised, apply(x, eps, group, weight_of))


@functools.cache
def _untraced() -> Callable[..., object]:
    hidden: Callable[..., object] = torch.compiler.disable(
        _Normalise.apply, reason="it waits for other workers"
    )
    return hidden


def _along(per_channel: Tensor, like: Tensor) -> Tensor:
    return per_channel.view(1, -1, *[1] * (like.dim() - 2))


class _Global(_BatchNorm):
    """Replaces a torch layer's class; its state_dict keys do not change."""

    echelon_group: Group
    echelon_weight: Callable[[], float]

    def forward(self, input: Tensor) -> Tensor:
        """In training, normalise over all workers' samples; otherwise as torch does."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        out, mean, variance, total = _normalise(input, self.eps, self.echelon_group, self.echelon_weight)
        self._note(mean, variance, total)
        if not self.affine:
            return out
        return (out * _along(self.weight, out) + _along(self.bias, out)).to(input.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A group belongs to this process, so copies and pickles are torch's own layers, built small; the
        # state then replaces all of it.
        own = next(own for own, wide in _GLOBAL.items() if type(self) is wide)
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("echelon_")}
        return own, (1,), state

    @torch.no_grad()
    def _note(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (total / (total - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _Global1d(_Global, nn.BatchNorm1d):
    pass


class _Global2d(_Global, nn.BatchNorm2d):
    pass


class _Global3d(_Global, nn.BatchNorm3d):
    pass


_GLOBAL = {nn.BatchNorm1d: _Global1d, nn.BatchNorm2d: _Global2d, nn.BatchNorm3d: _Global3d}


def layers(model: nn.Module) -> list[nn.Module]:
    """The model's batch normalisation layers, if they are of torch's own types."""
    return [module for module in model.modules() if type(module) in _GLOBAL]


def make_local(model: nn.Module) -> None:
    """Undo `make_global`."""
    for layer in model.modules():
        if isinstance(layer, _Global):
            del layer.echelon_group, layer.echelon_weight
            layer.__class__ = next(own for own, wide in _GLOBAL.items() if type(layer) is wide)  # type: ignore[assignment]


def make_global(model: nn.Module, group: Group, weight_of: Callable[[], float]) -> int:
    """Make the model's batch normalisation span all workers, in place; returns the number of layers."""
    found = layers(model)
    for layer in found:
        layer.echelon_group = group  # type: ignore[assignment]
        layer.echelon_weight = weight_of  # type: ignore[assignment]
        layer.__class__ = _GLOBAL[type(layer)]  # type: ignore[index]
    return len(found)
