"""Batch normalisation over the global batch, so that N workers normalise as one process would.

Mean and variance come from all workers' samples. In backward, the two sums that every sample's gradient
depends on are also reduced over all workers. Workers may hold different numbers of samples: the loss is
sum_i w_i L_i, so worker i's output gradients enter those sums with weight w_i.

Each layer costs one small reduction in forward and one in backward, where all workers wait for the last:
an exchange, which the caller can measure. `prepare(batchnorm="local")` does as DDP does: statistics of the
worker's own share, and the leader's running statistics for all.

With x the input, g the output's gradient, and per channel mean m, scale s = 1 / sqrt(variance + eps),
affine weight w and bias b over N samples in all:

    y  = a x + c           a = w s, c = b - a m
    dx = a g + p x + q     p = -a s T / N, q = -a S / N - p m, with S = sum g, T = sum g s (x - m)

S and T of this worker alone are the gradients of b and w. Vectors by channel are combined in float64, so
that each pass over the activations is one multiplication and one addition of rounded coefficients, as in
torch's own kernels.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.future import Future
from echelon.comm.group import Group

Exchange = Callable[[], AbstractContextManager[None]]  # in it, workers meet


@dataclass(frozen=True, slots=True)
class _Workers:
    """With whom a layer normalises: their group, this worker's weight, and what surrounds exchanges."""

    group: Group
    weight_of: Callable[[], float]
    exchange: Exchange

    def all_gather(self, own: Tensor) -> list[Tensor]:
        with self.exchange():
            return self.group.all_gather(own)

    def wait(self, pending: Future[Tensor]) -> Tensor:
        with self.exchange():
            return pending.wait()


@dataclass(frozen=True, slots=True)
class _Moments:
    """Mean and variance by channel over `count` samples, in float64."""

    count: float
    mean: Tensor
    variance: Tensor


class _Normalise(torch.autograd.Function):
    """Normalises with statistics over all workers' samples, and applies the layer's weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: _Global) -> Tensor:
        workers = layer.echelon_workers
        wide = x.to(_wide(x))
        over = _combined(workers.all_gather(_own_moments(wide)))
        scale = torch.rsqrt(over.variance + layer.eps)
        slope = scale if weight is None else scale * weight
        offset = slope * over.mean
        offset = offset.neg_() if bias is None else bias - offset
        out = _straight(wide, slope.to(wide.dtype), offset.to(wide.dtype)).to(x.dtype)
        layer._note(over)
        ctx.save_for_backward(x, over.mean, scale, slope)
        ctx.workers, ctx.count = workers, over.count
        ctx.kinds = [None if given is None else given.dtype for given in (weight, bias)]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, mean, scale, slope = ctx.saved_tensors
        workers, weight = ctx.workers, ctx.workers.weight_of()
        wide = x.to(_wide(x))
        grad = _laid_out_as(grads[0].to(wide.dtype), wide)
        own = _gradient_sums(grad, wide, mean.to(wide.dtype), scale.to(wide.dtype))
        # The other workers' sums arrive while this one computes what does not depend on them.
        pending = workers.group.all_reduce(own * weight)
        dx = grad * _along(slope.to(wide.dtype), x)
        sums = workers.wait(pending).double() / (ctx.count * weight or 1.0)
        total, along_scale = sums.chunk(2)
        tilt = -slope * scale * along_scale
        shift = torch.addcmul(slope * total, tilt, mean).neg_()
        dx.addcmul_(wide, _along(tilt.to(wide.dtype), x)).add_(_along(shift.to(wide.dtype), x))
        grad_bias, grad_weight = own.chunk(2)
        weight_kind, bias_kind = ctx.kinds
        return (
            dx.to(x.dtype),
            None if weight_kind is None else grad_weight.to(weight_kind),
            None if bias_kind is None else grad_bias.to(bias_kind),
            None,
        )


def _own_moments(x: Tensor) -> Tensor:
    """Mean and sum of squared deviations by channel of this worker's samples, and their number."""
    axes, channels = [0, *range(2, x.dim())], x.size(1)
    moments = x.new_zeros(2 * channels + 1)
    if x.numel():
        mean, spread, count = moments.split([channels, channels, 1])
        torch.mean(x, axes, out=mean)
        # Squares about the worker's own mean: about zero, large means would cancel the difference.
        torch.sum((x - _along(mean, x)).square_(), axes, out=spread)
        count.fill_(x.numel() // channels)
    return moments


def _combined(parts: list[Tensor]) -> _Moments:
    """The moments of all workers' samples (Chan, Golub and LeVeque, 1979), in the order of ranks."""
    rows = torch.stack(parts).double()
    channels = rows.size(1) // 2
    means, spreads, counts = rows.split([channels, channels, 1], dim=1)
    count = float(counts.sum())
    mean = (means * counts).sum(0).div_(count)
    variance = torch.addcmul(spreads, (means - mean).square_(), counts).sum(0).div_(count)
    return _Moments(count, mean, variance)


def _gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """By channel, the sums of the gradient, and of the gradient times the normalised input."""
    if not x.numel():
        return x.new_zeros(2 * x.size(1))
    _, along_scale, total = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return torch.cat([total, along_scale])


def _straight(x: Tensor, slope: Tensor, offset: Tensor) -> Tensor:
    """`slope * x + offset` by channel, in one pass."""
    if x.is_contiguous() and x.numel():
        zeros, ones = _unit(x.size(1), x.dtype, x.device)
        return torch.batch_norm(x, slope, offset, zeros, ones, False, 0.0, 0.0, False)
    return torch.addcmul(_along(offset, x), x, _along(slope, x))


@functools.lru_cache(maxsize=64)
def _unit(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean 0 and variance 1, which are not changed."""
    return torch.zeros(channels, dtype=dtype, device=device), torch.ones(
        channels, dtype=dtype, device=device
    )


def _laid_out_as(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient with the input's strides: kernels are fast where both agree."""
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x).copy_(grad)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _normalise(x: Tensor, layer: _Global) -> Tensor:
    """Normalise outside of torch.compile, which would trace the waits for other workers."""
    compiler = "torch._dynamo" in sys.modules  # slow to import, and loaded if anything is compiled
    apply = _untraced() if compiler else _Normalise.apply
    return cast(Tensor, apply(x, layer.weight, layer.bias, layer))


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

    echelon_workers: _Workers

    def forward(self, input: Tensor) -> Tensor:
        """In training, normalise over all workers' samples; otherwise as torch does."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        return _normalise(input, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A group belongs to this process, so copies and pickles are torch's own layers, built small; the
        # state then replaces all of it.
        own = next(own for own, wide in _GLOBAL.items() if type(self) is wide)
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("echelon_")}
        return own, (1,), state

    @torch.no_grad()
    def _note(self, over: _Moments) -> None:
        """Follow the statistics, as torch does: the unbiased variance."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = over.variance * (over.count / max(over.count - 1, 1))
        self.running_mean.lerp_(over.mean.to(self.running_mean.dtype), rate)
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
            del layer.echelon_workers
            layer.__class__ = next(own for own, wide in _GLOBAL.items() if type(layer) is wide)  # type: ignore[assignment]


def make_global(
    model: nn.Module,
    group: Group,
    weight_of: Callable[[], float],
    exchange: Exchange = nullcontext,
) -> int:
    """Make the model's batch normalisation span all workers, in place; returns the number of layers."""
    found = layers(model)
    for layer in found:
        layer.echelon_workers = _Workers(group, weight_of, exchange)  # type: ignore[assignment]
        layer.__class__ = _GLOBAL[type(layer)]  # type: ignore[index]
    return len(found)
