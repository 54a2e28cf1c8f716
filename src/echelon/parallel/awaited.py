"""How does an unchanged loop run a schedule that needs the loss: `loss_fn(model(x), y)`, `backward()`?

`model(x)` returns an output that is not computed yet. If the first thing that a script computes from it
is a loss that goes by micro-batches (`losses.py`), the schedule runs then, forward and backward, and the
loss comes back with a node that hands the gradients over in `backward()`, scaled by the loss's own
gradient. If a script does anything else with the output first, it is computed by forward passes alone,
and the backward passes follow when their gradient comes, as with GPipe. The result is the same. Shapes
may change in between, as long as each sample's rows stay together: `logits.view(-1, classes)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.errors import ModelError
from echelon.parallel.losses import MicroLoss, micro_loss
from echelon.parallel.micro import ModelCall

if TYPE_CHECKING:
    from echelon.parallel.split import Gradients
    from echelon.parallel.stage import PipelineStage

_TRAINED = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("grad_fn", "requires_grad"))


class AwaitedOutput(Tensor):
    """Stands for a model's output, or for that in another shape, until it is needed."""

    @staticmethod
    def of(stage: PipelineStage, call: ModelCall) -> AwaitedOutput:
        """The output of this call."""
        made: AwaitedOutput = torch.empty(0).as_subclass(AwaitedOutput)
        vars(made).update(origin=_Origin(stage, call), shaped=())
        return made

    def _in_shape(self, change: Callable[[Tensor], Tensor]) -> AwaitedOutput:
        made: AwaitedOutput = torch.empty(0).as_subclass(AwaitedOutput)
        vars(made).update(origin=vars(self)["origin"], shaped=(*vars(self)["shaped"], change))
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A loss runs the schedule; hooks on the output wait; anything else needs the output now."""
        given = kwargs or {}
        first = args[0] if args else given.get("input")
        if isinstance(first, AwaitedOutput) and first.__dict__["origin"].value is None:
            origin: _Origin = first.__dict__["origin"]
            if func in _TRAINED:
                return True
            if func is Tensor.register_hook and not first.__dict__["shaped"]:
                origin.hooks.append(args[1])
                return None
            if keeps_samples(func, args[1:], given):
                return first._in_shape(lambda one: func(one, *args[1:], **given))
            loss = micro_loss(func, tuple(args), given, origin.call.rows)
            if loss is not None and torch.is_grad_enabled():
                return origin.scheduled(replace(loss, shaped=first._shape))
        with torch._C.DisableTorchFunctionSubclass():
            own_args, own_given = pytree.tree_map(_real, (tuple(args), given))
            return func(*own_args, **own_given)

    def _shape(self, output: Tensor) -> Tensor:
        for change in vars(self)["shaped"]:
            output = change(output)
        return output


def _real(value: Any) -> Any:
    return value._shape(value.__dict__["origin"].passed()) if isinstance(value, AwaitedOutput) else value


def keeps_samples(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes the shape so that it may as well be done to each micro-batch."""
    if func in (Tensor.view, Tensor.reshape):
        sizes = args[0] if args and isinstance(args[0], (tuple, list)) else args
        return len(sizes) > 0 and sizes[0] == -1 and not kwargs
    if func in (Tensor.flatten, torch.flatten):
        return (args[0] if args else kwargs.get("start_dim", 0)) == 0 and len(args) + len(kwargs) == 2
    if func in (Tensor.transpose, torch.transpose):
        return len(args) == 2 and all(isinstance(one, int) and one > 0 for one in args)
    return func in (Tensor.contiguous, Tensor.float, Tensor.double) and not args and not kwargs


class _Origin:
    """A call of the model that may not have run yet. `hooks` are for the gradient of its output."""

    def __init__(self, stage: PipelineStage, call: ModelCall) -> None:
        self._stage = stage
        self.call = call
        self.hooks: list[Callable[[Tensor], Tensor | None]] = []
        self.value: Tensor | None = None

    def passed(self) -> Tensor:
        """The output, by forward passes alone if no schedule has run."""
        if self.value is None:
            with torch.enable_grad():
                output = self._stage.passed(self.call)
            if not isinstance(output, Tensor):
                raise not_one_tensor(output)
            self._hooked(output)
            self.value = output
        return self.value

    def scheduled(self, loss: MicroLoss) -> Tensor:
        """The loss, by the whole schedule."""
        anchor = torch.zeros((), requires_grad=True)  # so that autograd calls back
        value: Tensor
        value, self.value = _Scheduled.apply(  # type: ignore[no-untyped-call]
            anchor, self._stage, self.call, loss
        )
        self._hooked(value)
        return value

    def _hooked(self, tensor: Tensor) -> None:
        for hook in self.hooks:
            tensor.register_hook(hook)


def not_one_tensor(output: Any) -> ModelError:
    """The error for a model whose output a schedule with a loss cannot take."""
    return ModelError(
        f"the model returns a {type(output).__name__}, and this schedule computes a loss from one tensor",
        where="forward pass of a pipeline",
        fix="use pipeline(schedule=gpipe), or return one tensor",
    )


class _Scheduled(torch.autograd.Function):
    """A whole schedule as one operation: its results are the loss, and the model's output."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, stage: PipelineStage, call: ModelCall, loss: MicroLoss) -> Any:
        """Run it; gradients of the parameters are kept until their factor is known."""
        with torch.enable_grad():
            value, output, gradients = stage.scheduled(call, loss)
        ctx.stage, ctx.gradients = stage, gradients
        ctx.set_materialize_grads(False)
        return value, output

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_output: Tensor | None) -> Any:
        """Hand the gradients over."""
        if of_output is not None:
            raise ModelError(
                "a second loss was computed from an output whose backward passes are done",
                where="backward pass of a pipeline",
                fix="use pipeline(schedule=gpipe), or compute one loss by one function",
            )
        if ctx.gradients is None:
            raise called_twice()
        gradients: Gradients = ctx.gradients
        ctx.gradients = None
        if of_loss is not None:
            ctx.stage.land([None if one is None else one.mul_(of_loss) for one in gradients])
        return None, None, None, None


def called_twice() -> ModelError:
    """The error for a second backward pass."""
    return ModelError(
        "backward() was called twice for one forward pass of a pipeline",
        where="backward pass of a pipeline",
        fix="run the model again, or add up losses before backward()",
    )
