"""Batch normalisation over the global batch, so that N workers normalise as one process would.

Mean and variance come from all workers' samples. In backward, the two sums that every sample's gradient
depends on are also reduced over all workers. Workers may hold different numbers of samples: the loss is
sum_i w_i L_i, so worker i's output gradients enter those sums with weight w_i.

Each layer costs one small reduction in forward and one in backward, where all workers wait for the last:
an exchange, which the caller can measure. `prepare(batchnorm="local")` does as DDP does: statistics of the
worker's own share, and the leader's running statistics for all.

With x the input, g the output's gradient, and per channel mean m, scale s = 1 / sqrt(variance + eps),
affine weight w and bias b over N samples in all:

    y  = w s (x - m) + b
    dx = a g + p x + q     a = w s, p = -a s T / N, q = -a S / N - p m, with S = sum g, T = sum g s (x - m)

S and T of this worker alone are the gradients of b and w. What is by channel is combined in float64. Passes
over activations are torch's kernels: sums and squares about the running mean in one, and the normalisation;
in backward S and T at once, and two for dx. Where the running mean is far from the mean, or both from zero,
squares about it would cancel: then a mean, deviations from it, and their squares.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.future import Future
from echelon.comm.group import Group
from echelon.train import convolution

Exchange = Callable[[], AbstractContextManager[None]]  # in it, workers meet
Vector = npt.NDArray[np.float64]  # by channel
_MOST_LOST = 9.0  # where the mean is two deviations from zero and from the running mean


@dataclass(frozen=True, slots=True)
class _Workers:
    """With whom a layer normalises: their group, this worker's weight, and what surrounds exchanges."""

    group: Group
    weight_of: Callable[[], float]
    exchange: Exchange
    turns: convolution.Turns
    copies: int = 1  # how many workers have the same samples

    def all_gather(self, own: Tensor) -> list[Tensor]:
        with self.exchange():
            return self.group.all_gather(own)

    def receive(self, sums: Future[Tensor]) -> Tensor:
        with self.exchange():
            return sums.wait()


@dataclass(frozen=True, slots=True)
class _Moments:
    """Mean and variance by channel over `count` samples."""

    count: float
    mean: Vector
    variance: Vector

    def unbiased(self, copies: int) -> Vector:
        """What torch keeps as the running variance; samples that several workers have count once."""
        count = self.count / copies
        return self.variance * (count / max(count - 1, 1))


class _Sent:
    """The sums of all workers, in flight between the two nodes of a layer's backward pass."""

    saved: tuple[Tensor, Tensor | None]  # a checkpoint gives saved tensors out once
    part: float
    grad_bias: Tensor
    grad_weight: Tensor
    sums: Future[Tensor]


class _Normalise(torch.autograd.Function):
    """Normalises with statistics over all workers' samples, and applies the layer's weight and bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: _Global) -> Tensor:
        workers, wide = layer.echelon_workers, _wide(x)
        over = _combined(workers.all_gather(_own_moments(x.to(wide), layer.running_mean)))
        scale = 1.0 / np.sqrt(over.variance + layer.eps)
        by_channel = over.mean, over.variance, over.unbiased(workers.copies), scale
        mean, variance, unbiased, rounded_scale = _rounded(*by_channel, like=x)
        layer._note(mean, unbiased)
        ctx.save_for_backward(x, weight)
        ctx.sent = _Sent()
        ctx.workers, ctx.over, ctx.scale, ctx.rounded = workers, over, scale, (mean, rounded_scale)
        ctx.kinds = [None if given is None else given.dtype for given in (weight, bias)]
        if not x.numel():
            return x.clone()
        weight, bias = (None if given is None else given.to(wide) for given in (weight, bias))
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, layer.eps, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        workers, sent, mean, scale = ctx.workers, ctx.sent, ctx.over.mean, ctx.scale
        x, weight = sent.saved
        wide = x.to(_wide(x))
        grad = _laid_out_as(grads[0].to(wide.dtype), wide)
        sums = _numbers(workers.receive(sent.sums)).reshape(2, -1)
        part, grad_bias, grad_weight = sent.part, sent.grad_bias, sent.grad_weight
        del sent.saved, sent.sums
        sums /= ctx.over.count * part or 1.0
        slope = scale if weight is None else scale * _numbers(weight)
        tilt = -slope * scale * sums[1]
        shift = -slope * sums[0] - tilt * mean
        dx = _plane(grad, wide, *_rounded(slope, tilt, shift, like=x))
        weight_kind, bias_kind = ctx.kinds
        return (
            dx.to(x.dtype),
            None if weight_kind is None else grad_weight.to(weight_kind),
            None if bias_kind is None else grad_bias.to(bias_kind),
            None,
        )


class _SendSums(torch.autograd.Function):
    """Passes a layer's output on; in backward sends this worker's sums; `_Normalise` receives all."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, node: Any) -> Tensor:
        ctx.node = node
        return out.detach()  # the same memory, but no view: later layers may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        workers, sent = ctx.node.workers, ctx.node.sent
        sent.saved = ctx.node.saved_tensors
        x = sent.saved[0]
        sent.part = workers.weight_of()
        wide = x.to(_wide(x))
        grad = _laid_out_as(grads[0].to(wide.dtype), wide)
        sent.grad_bias, sent.grad_weight = _both_sums(grad, wide, *ctx.node.rounded)
        own = torch.cat([sent.grad_bias, sent.grad_weight]).mul_(sent.part)
        sent.sums = workers.group.all_reduce(own)
        return grads[0] if grads[0].dtype != grad.dtype else grad, None


def _own_moments(x: Tensor, about: Tensor | None = None) -> Tensor:
    """Mean and sum of squared deviations by channel of this worker's samples, and their number.

    `about`: roughly the mean, if it is known.
    """
    channels = x.size(1)
    if not x.numel():
        return x.new_zeros(2 * channels + 1)
    count = x.numel() // channels
    found = _moments_about(x, about, count)
    if found is not None:
        return found
    mean = x.mean([0, *range(2, x.dim())])
    # Squares about the worker's own mean: about zero, large means would cancel the difference.
    apart = x - _along(mean, x)
    spread = _both_sums(apart, apart, *_unit(channels, x.dtype, x.device))[1]
    return torch.cat([mean, spread, mean.new_full((1,), count)])


def _moments_about(x: Tensor, about: Tensor | None, count: int) -> Tensor | None:
    """The same by one pass, with K = `about`: sum (x - m)^2 = sum x (x - K) - K sum (x - K) - N (m - K)^2.

    None if it would lose digits: terms x (x - K) are larger than squared deviations, by this factor.
    """
    near, ones = _unit(x.size(1), x.dtype, x.device)
    if about is not None:
        near = about.to(x.dtype)
    total, product = (_numbers(sums) for sums in _both_sums(x, x, near, ones))
    with np.errstate(all="ignore"):  # what is not finite is for the other way
        shift = _numbers(near)
        mean = total / count
        apart = mean - shift
        spread = product - total * shift + count * shift * shift - count * apart * apart
        deviation = np.sqrt(spread / count)
        terms = (np.abs(mean) + deviation) * (np.abs(apart) + deviation)
        if not (terms <= _MOST_LOST * deviation * deviation).all():
            return None
    return torch.from_numpy(np.concatenate([mean, spread, [count]])).to(x.device, x.dtype)


def _combined(parts: list[Tensor]) -> _Moments:
    """The moments of all workers' samples (Chan, Golub and LeVeque, 1979), in the order of ranks."""
    rows = np.array([part.cpu().numpy() for part in parts], dtype=np.float64)
    channels = rows.shape[1] // 2
    means, spreads, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = float(np.add.reduce(counts[:, 0]))
    mean = np.add.reduce(means * counts) / count
    apart = means - mean
    variance = np.add.reduce(spreads + counts * apart * apart) / count
    return _Moments(count, mean, variance)


def _both_sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """By channel, the sum of `grad`, and that of `grad * scale * (x - mean)`, in one pass."""
    if not x.numel():
        return x.new_zeros(x.size(1)), x.new_zeros(x.size(1))
    _, product, total = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, None, None, mean, scale, True, 0.0, [False, True, True]
    )
    return total, product


def _plane(grad: Tensor, x: Tensor, slope: Tensor, tilt: Tensor, shift: Tensor) -> Tensor:
    """`slope * grad + tilt * x + shift` by channel, in two passes and one new tensor."""
    if x.is_contiguous() and x.numel():  # a kernel that is fast for this layout only
        zeros, ones = _unit(x.size(1), x.dtype, x.device)
        straight = torch.batch_norm(x, tilt, shift, zeros, ones, False, 0.0, 0.0, False)
    else:
        straight = torch.addcmul(_along(shift, x), x, _along(tilt, x))
    return straight.addcmul_(grad, _along(slope, x))


@functools.lru_cache(maxsize=64)
def _unit(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean 0 and variance 1; nobody changes them."""
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    return torch.zeros(channels, **kind), torch.ones(channels, **kind)


def _laid_out_as(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient with the input's strides: kernels are fast where both agree."""
    if grad.stride() == x.stride():
        return grad
    return torch.empty_like(x).copy_(grad)


def _numbers(values: Tensor) -> Vector:
    """In float64, in the memory of the host."""
    return values.numpy(force=True).astype(np.float64)


def _rounded(*vectors: Vector, like: Tensor) -> tuple[Tensor, ...]:
    """As tensors of the type in which an input is normalised, where the input is."""
    return torch.from_numpy(np.array(vectors)).to(like.device, _wide(like)).unbind()


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _normalise(x: Tensor, layer: _Global) -> Tensor:
    """Normalise outside of torch.compile, which would trace the waits for other workers."""
    compiler = "torch._dynamo" in sys.modules  # slow to import, and loaded if anything is compiled
    return (_untraced() if compiler else _both_nodes)(x, layer)


def _both_nodes(x: Tensor, layer: _Global) -> Tensor:
    out = cast(Tensor, _Normalise.apply(x, layer.weight, layer.bias, layer))  # type: ignore[no-untyped-call]
    if out.grad_fn is None:
        return out
    out = cast(Tensor, _SendSums.apply(out, out.grad_fn))  # type: ignore[no-untyped-call]
    assert out.grad_fn is not None
    # Behind the weight gradient that fills the wait: see convolution.py.
    before = max(0, out.grad_fn._sequence_nr() - 2)
    out.grad_fn.next_functions[0][0]._set_sequence_nr(before)  # type: ignore[union-attr]
    layer.echelon_workers.turns.sums_sent_by(out.grad_fn)
    return out


@functools.cache
def _untraced() -> Callable[[Tensor, _Global], Tensor]:
    hidden: Callable[[Tensor, _Global], Tensor] = torch.compiler.disable(
        _both_nodes, reason="it waits for other workers"
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
    def _note(self, mean: Tensor, variance: Tensor) -> None:
        """Follow the statistics, as torch does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
        self.running_var.lerp_(variance.to(self.running_var.dtype), rate)


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
    convolution.release(model)
    for layer in model.modules():
        if isinstance(layer, _Global):
            del layer.echelon_workers
            layer.__class__ = next(own for own, wide in _GLOBAL.items() if type(layer) is wide)  # type: ignore[assignment]


def make_global(
    model: nn.Module,
    group: Group,
    weight_of: Callable[[], float],
    exchange: Exchange = nullcontext,
    *,
    copies: int = 1,
) -> int:
    """Make the model's batch normalisation span all workers, in place; returns the number of layers."""
    found = layers(model)
    workers = _Workers(group, weight_of, exchange, convolution.Turns(), copies)
    convolution.delay(model, workers.turns)
    for layer in found:
        layer.echelon_workers = workers  # type: ignore[assignment]
        layer.__class__ = _GLOBAL[type(layer)]  # type: ignore[index]
    return len(found)
