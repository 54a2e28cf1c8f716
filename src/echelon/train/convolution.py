"""Which convolutions compute their weight gradient while statistics of batch normalisation travel?

In backward, all workers meet at every batch normalisation over all samples. The gradient of the next
convolution's weight is needed by nobody until the round ends, so it is computed there: after this worker
has sent its sums for the normalisation before it, and before it waits for the others'. A worker that comes
early computes instead of waiting.

Autograd runs, of the nodes that are ready, the one with the highest sequence number. So the node that
computes a weight gradient gets the number behind the one that sends the sums:

    forward     normalise Q, send sums P, activation, convolution A, weight gradient B
    backward    A, activation, P, B, Q: the sums travel while B is computed

Gradients still reach their parameters through autograd, so hooks, accumulation and `autograd.grad` work as
before. As in `batchnorm.py`, the layer's class is replaced: the module, its names and its state_dict stay,
and copies and pickles are torch's own layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.conv import _ConvNd

# Multiplications of a weight gradient that is worth delaying: two more nodes take about 0.1 ms, and waits
# of workers that compute little between two layers are as short.
_LEAST_WORK = 10**8


class Turns:
    """Behind which node of autograd the next convolution's weight gradient is computed."""

    def __init__(self) -> None:
        self._number: int | None = None

    def sums_sent_by(self, node: torch.autograd.graph.Node) -> None:
        """This node sends sums in backward; the next convolution fills the wait for the others'."""
        self._number = node._sequence_nr()

    def take(self) -> int | None:
        """The sequence number of the next convolution's weight gradient; None: there is no wait to fill."""
        number, self._number = self._number, None
        return None if number is None else max(0, number - 1)


class _KeptGradient:
    """The gradient of a convolution's output, until its weight's gradient is computed."""

    grad: Tensor | None = None


class _WeightGradient(torch.autograd.Function):
    """Computes the weight's gradient of a convolution from what `_KeepGradient` has kept."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, layer: _Delayed, kept: _KeptGradient) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = kept
        ctx.how = layer.stride, layer.padding, layer.dilation, layer.groups
        return weight.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad, ctx.kept.grad = ctx.kept.grad, None
        stride, padding, dilation, groups = ctx.how
        _, found, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups,
            [False, True, False],
        )  # fmt: skip
        return found, None, None, None


class _KeepGradient(torch.autograd.Function):
    """Passes a convolution's output on; in backward keeps its gradient for `_WeightGradient`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, token: Tensor, kept: _KeptGradient) -> Tensor:
        ctx.kept = kept
        return out.detach()  # the same memory, but no view: later layers may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.kept.grad = grad
        return grad, grad.new_zeros(()), None


class _Delayed(_ConvNd):
    """Replaces a torch layer's class; its state_dict keys do not change."""

    echelon_turns: Turns

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        plain = super()._conv_forward
        number = self.echelon_turns.take() if self._is_worth_it(input, weight) else None
        if number is None:
            return plain(input, weight, bias)
        out = plain(input, weight.detach(), bias)
        kept = _KeptGradient()
        token = _WeightGradient.apply(weight, input.detach(), self, kept)  # type: ignore[no-untyped-call]
        token.grad_fn._set_sequence_nr(number)
        return _KeepGradient.apply(out, token, kept)  # type: ignore[no-any-return,no-untyped-call]

    def _is_worth_it(self, input: Tensor, weight: Tensor) -> bool:
        if not (weight.requires_grad and torch.is_grad_enabled()) or input.dim() != weight.dim():
            return False
        positions = input.numel() // max(1, input.size(1) * math.prod(self.stride))
        wanted = positions * weight.numel() >= _LEAST_WORK
        return wanted and not (torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling())

    def __reduce_ex__(self, protocol: Any) -> Any:
        # On the meta device, building a layer draws no random numbers; the state then replaces all of it.
        own = next(own for own, wide in _DELAYED.items() if type(self) is wide)
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("echelon_")}
        return _built, (own,), state


class _Delayed1d(_Delayed, nn.Conv1d):
    pass


class _Delayed2d(_Delayed, nn.Conv2d):
    pass


class _Delayed3d(_Delayed, nn.Conv3d):
    pass


_DELAYED = {nn.Conv1d: _Delayed1d, nn.Conv2d: _Delayed2d, nn.Conv3d: _Delayed3d}


def _built(kind: type[_ConvNd]) -> nn.Module:
    return kind(1, 1, 1, bias=False, device="meta")  # type: ignore[call-arg,arg-type]


def delay(model: nn.Module, turns: Turns) -> int:
    """Let the model's convolutions fill waits, in place; returns their number."""
    found = [module for module in model.modules() if type(module) in _DELAYED and _plain(module)]
    for layer in found:
        layer.echelon_turns = turns  # type: ignore[assignment]
        layer.__class__ = _DELAYED[type(layer)]  # type: ignore[index]
    return len(found)


def _plain(layer: nn.Module) -> bool:
    """Whether it computes as torch's layer does, on the processor, with numbers as padding."""
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and layer.padding_mode == "zeros"
        and not isinstance(layer.padding, str)
        and "forward" not in layer.__dict__
        and "_conv_forward" not in layer.__dict__
    )


def release(model: nn.Module) -> None:
    """Undo `delay`."""
    for layer in model.modules():
        if isinstance(layer, _Delayed):
            del layer.echelon_turns
            layer.__class__ = next(own for own, wide in _DELAYED.items() if type(layer) is wide)  # type: ignore[assignment]
