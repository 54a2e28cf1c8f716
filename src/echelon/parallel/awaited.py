"""How does an unchanged loop run a schedule that needs the loss: `loss_fn(model(x), y)`, `backward()`?

`model(x)` returns an output that is not computed yet. If the first thing that a script computes from it
is a loss that goes by micro-batches (`losses.py`), the schedule runs then, forward and backward, and the
loss comes back with a node that hands the gradients over in `backward()`, scaled by the loss's own
gradient. If a script does anything else with the output first, it is computed by forward passes alone,
and the backward passes follow when their gradient comes, as with GPipe. The result is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.errors import ModelError
from echelon.parallel.losses import MicroLoss, micro_loss
from echelon.parallel.micro import ModelCall

if TYPE_CHECKING:
    from echelon.parallel.stage import Gradients, PipelineStage

_TRAINED = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("grad_fn", "requires_grad"))


class AwaitedOutput(Tensor):
    """Stands for a model's output until it is needed."""

    _stage: PipelineStage
    _call: ModelCall
    _hooks: list[Callable[[Tensor], Tensor | None]]
    _value: Tensor | None

    @staticmethod
    def of(stage: PipelineStage, call: ModelCall) -> AwaitedOutput:
        """The output of this call."""
        made: AwaitedOutput = torch.empty(0).as_subclass(AwaitedOutput)
        vars(made).update(_stage=stage, _call=call, _hooks=[], _value=None)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """A loss runs the schedule; hooks on the output wait; anything else needs the output now."""
        given = kwargs or {}
        first = args[0] if args else given.get("input")
        if isinstance(first, AwaitedOutput) and first.__dict__["_value"] is None:
            if func in _TRAINED:
                return True
            if func is Tensor.register_hook:
                first.__dict__["_hooks"].append(args[1])
                return None
            call = first.__dict__["_call"]
            loss = micro_loss(func, tuple(args), given, call.rows) if torch.is_grad_enabled() else None
            if loss is not None:
                return _loss(first, loss)
        with torch._C.DisableTorchFunctionSubclass():
            own_args, own_given = pytree.tree_map(_real, (tuple(args), given))
            return func(*own_args, **own_given)


def _real(value: Any) -> Any:
    if not isinstance(value, AwaitedOutput):
        return value
    own = value.__dict__
    if own["_value"] is None:
        with torch.enable_grad():
            output = own["_stage"].passed(own["_call"])
        if not isinstance(output, Tensor):
            raise not_one_tensor(output)
        for hook in own["_hooks"]:
            output.register_hook(hook)
        own["_value"] = output
    return own["_value"]


def not_one_tensor(output: Any) -> ModelError:
    """The error for a model whose output a schedule with a loss cannot take."""
    return ModelError(
        f"the model returns a {type(output).__name__}, and this schedule computes a loss from one tensor",
        where="forward pass of a pipeline",
        fix="use pipeline(schedule=gpipe), or return one tensor",
    )


def _loss(awaited: AwaitedOutput, loss: MicroLoss) -> Tensor:
    """Run the schedule with this loss."""
    own = awaited.__dict__
    anchor = torch.zeros((), requires_grad=True)
    value, output = _Scheduled.apply(anchor, own["_stage"], own["_call"], loss)  # type: ignore[no-untyped-call]
    for hook in own["_hooks"]:
        value.register_hook(hook)
    own["_value"] = output
    total: Tensor = value
    return total


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
            ctx.stage.landed([None if one is None else one.mul_(of_loss) for one in gradients])
        return None, None, None, None


def called_twice() -> ModelError:
    """The error for a second backward pass."""
    return ModelError(
        "backward() was called twice for one forward pass of a pipeline",
        where="backward pass of a pipeline",
        fix="run the model again, or add up losses before backward()",
    )
