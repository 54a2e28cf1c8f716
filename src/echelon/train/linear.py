"""Which linear layers can give factors, and how are the factors captured in backward?

The weight gradient of a linear layer is G^T X: G holds the gradients of its outputs, X its inputs, one row
for every sample. An attached layer is in one of two modes. In watch mode its gradient is dense as always;
its rows are counted, and obstacles to factors are noted. In factors mode backward leaves the weight without
a gradient and keeps (G, X) instead.

Forward, and the gradients of input and bias, are computed by `F.linear`. An autograd node behind it
captures the rows. The node also leads to an anchor: a leaf of its own, whose hook runs once in every
backward pass that accumulates gradients, after all uses of the layer. With `torch.autograd.grad` the hook
does not run, and no rows are kept.

As in `batchnorm.py`, the layer's class is replaced: the module, its names and its state_dict stay, and
copies and pickles are plain `nn.Linear`.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from echelon.errors import ModelError

Mode = Literal["watch", "factors"]

_TAKEN_BACK = -2  # in place of the number of a backward pass
_FIX = "use factors='never' (--factors never)"


class LinearCapture:
    """Captures one layer's rows. `scale()` is their factor; `on_ready` is called after each backward pass.

    `rows` counts the rows since the last `take()` or `clear()`, in either mode. `obstacle` is what forbids
    factors, seen in watch mode; empty if nothing does.
    """

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        scale: Callable[[], float],
        on_ready: Callable[[LinearCapture], None],
    ) -> None:
        self.name = name
        self.weight = weight
        self.mode: Mode = "watch"
        self.obstacle = ""
        self.rows = 0
        self._scale = scale
        self._scaled_by = 1.0  # the rows of this pass
        self._taken: tuple[Tensor, Tensor] | None = None
        self._on_ready = on_ready
        self._dtype = weight.dtype
        self._kept: list[tuple[int, Tensor, Tensor]] = []  # backward pass, G, X
        self._through_with: set[int] = set()  # backward passes; a reentrant one is within another
        self._own: dict[int, list[Tensor]] = {}  # the layer's parts of the gradient, by backward pass
        self._anchor = torch.zeros((), requires_grad=True)
        self._handles = [
            self._anchor.register_post_accumulate_grad_hook(self._through),
            weight.register_hook(self._dense),
        ]

    def use(self, mode: Mode) -> None:
        """Change the mode, between two steps."""
        self.clear()
        self.mode = mode

    def lend(self, scale: float) -> tuple[Tensor, Tensor]:
        """As `take`, with another scale; the rows may be taken back, until `forget`."""
        grads, inputs = self._taken = self.take()
        if not scale:  # what is not finite would stay so
            return grads[:0], inputs[:0]
        return (grads, inputs) if scale == self._scaled_by else (grads * (scale / self._scaled_by), inputs)

    def take_back(self) -> None:
        """The rows that were lent are to be taken again."""
        if self._taken is not None:
            self._kept.insert(0, (_TAKEN_BACK, *self._taken))
            self._through_with.add(_TAKEN_BACK)
            self.forget()

    def forget(self) -> None:
        """The rows that were lent are needed no more."""
        self._taken = None

    def take(self) -> tuple[Tensor, Tensor]:
        """Return all rows (G, X), each G multiplied by its scale, and forget them.

        Rows of a pass that failed before it finished with this layer are dropped.
        """
        valid = {*self._through_with, torch._C._current_graph_task_id()}
        kept = [entry[1:] for entry in self._kept if entry[0] in valid]
        self.clear()
        if not kept:
            outputs, inputs = self.weight.shape
            return self.weight.new_empty(0, outputs), self.weight.new_empty(0, inputs)
        if len(kept) == 1:
            return kept[0]
        return torch.cat([grads for grads, _ in kept]), torch.cat([inputs for _, inputs in kept])

    @torch.no_grad()
    def fold(self, unit: float) -> None:
        """Add the gradient of the current pass's rows, divided by `unit`, to the weight's gradient."""
        grads, inputs = self.take()
        if not len(grads):
            return
        part = grad_from(grads / unit, inputs)
        self.weight.grad = part if self.weight.grad is None else self.weight.grad.add_(part)

    def clear(self) -> None:
        """Forget all rows."""
        self._kept = []
        self._through_with = set()
        self._own = {}
        self.rows = 0

    def close(self) -> None:
        """Remove the hooks. A graph that was built before still gives its dense gradient."""
        self.use("watch")
        for handle in self._handles:
            handle.remove()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear` with this layer's weight."""
        if not torch.is_grad_enabled() or not self.weight.requires_grad:
            return F.linear(x, self.weight, bias)
        obstacle = self._obstacle()
        if self.mode == "watch":
            self._note(obstacle)
            return self._watched(x, bias)
        if obstacle:  # this time the weight gets a dense gradient
            return F.linear(x, self.weight, bias)
        out = _linear(x, self.weight.detach(), bias)
        return _Catch.apply(out, x.detach(), self.weight, self._anchor, self)  # type: ignore[no-any-return,no-untyped-call]

    def _obstacle(self) -> str:
        if torch.is_autocast_enabled("cpu"):
            return "its forward pass runs under autocast"
        if self.weight.dtype != self._dtype or self.weight.device.type != "cpu":
            return f"its weight became {self.weight.dtype} on {self.weight.device}"
        if self.mode == "factors" and _has_hooks_of_others(self.weight):
            return "its weight has a hook, which would not see a gradient"
        return ""

    def _watched(self, x: Tensor, bias: Tensor | None) -> Tensor:
        alias = self.weight.view_as(self.weight)  # the gradient through it is the layer's own part
        alias.register_hook(functools.partial(self._own_part, x.numel() // self.weight.shape[1]))
        out = F.linear(x, alias, bias)
        # On the base's node: a tensor's own hook is lost when a view is changed in place.
        node = (out if out._base is None else out._base).grad_fn
        if node is not None:
            node.register_prehook(self._computing)
        return out

    def _computing(self, _grads: object) -> None:
        if torch.is_grad_enabled():
            self._note("backward runs with create_graph=True")

    def _own_part(self, rows: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        self._own.setdefault(torch._C._current_graph_task_id(), []).append(grad.detach())
        if self.mode == "watch" and _asked_for(self.weight) == "accumulate":
            self.rows += rows

    def _dense(self, grad: Tensor | None) -> None:
        """A gradient reaches the weight; note if a part of it is not from this layer."""
        own = self._own.pop(torch._C._current_graph_task_id(), [])
        if grad is None:
            return
        # The engine adds parts in order of arrival, so the same sum has the same bits.
        alone = own and torch.equal(functools.reduce(torch.add, own), grad)
        if self.mode == "watch" and not alone:
            self._note("its weight is used outside the layer")

    def _catch(self, grad: Tensor, x: Tensor) -> Tensor | None:
        """Keep these rows if this pass accumulates; returns the weight gradient if the pass needs it."""
        if torch.is_grad_enabled():
            raise self._refusal("backward runs with create_graph=True")
        if _asked_for(self.weight) == "nothing":
            return None
        outputs, inputs = self.weight.shape
        grads, x = grad.reshape(-1, outputs), x.reshape(-1, inputs)
        if self.mode == "watch" or _asked_for(self._anchor) == "nothing":
            return grad_from(grads, x)
        # Copies: the user may change activations once backward is over.
        inputs_kept = x.clone(memory_format=torch.contiguous_format)
        self._scaled_by = self._scale()
        self._kept.append((torch._C._current_graph_task_id(), grads * self._scaled_by, inputs_kept))
        self.rows += len(x)
        return None

    def _through(self, anchor: Tensor) -> None:
        anchor.grad = None
        if self.mode == "factors" and self.weight.requires_grad:
            self._through_with.add(torch._C._current_graph_task_id())
            self._on_ready(self)

    def _note(self, obstacle: str) -> None:
        self.obstacle = self.obstacle or obstacle

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"layer {self.name} keeps the factors of its gradient, but {why}",
            where=f"layer {self.name}",
            fix=_FIX,
        )


class _Catch(torch.autograd.Function):
    """Passes a layer's output on; in backward gives its gradient and the layer's input to the capture."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, x: Tensor, weight: Tensor, anchor: Tensor, capture: LinearCapture
    ) -> Tensor:
        ctx.capture = capture
        ctx.save_for_backward(x)
        return out.detach()  # the same memory, but no view: later layers may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None, Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad, None, ctx.capture._catch(grad, x), torch.zeros(()), None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` with the same bits as if the weight required a gradient."""
    if x.dim() < 3 or x.is_contiguous():
        return F.linear(x, weight, bias)
    # Torch flattens a non-contiguous input only if the weight requires a gradient; rounding depends on it.
    out = F.linear(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[0])
    return out if bias is None else out + bias


def _has_hooks_of_others(weight: Tensor) -> bool:
    """Whether the weight has hooks that are not Echelon's."""
    hooks = (weight._backward_hooks or {}).values()
    return any(
        not type(getattr(hook, "__self__", None)).__module__.startswith("echelon.") for hook in hooks
    )


def _asked_for(leaf: Tensor) -> Literal["accumulate", "return", "nothing"]:
    """What the current backward pass does with this leaf's gradient."""
    if not leaf.requires_grad:  # frozen since forward
        return "nothing"
    try:
        wanted = torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # raised by torch in an autograd.grad() of this very leaf
        return "return"
    return "accumulate" if wanted else "nothing"


class _Captured(nn.Linear):
    """Replaces a layer's class; its state_dict keys do not change."""

    echelon_capture: LinearCapture

    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Linear`, through the capture unless another tensor replaces the weight."""
        if torch.compiler.is_compiling() or self.weight is not self.echelon_capture.weight:
            return super().forward(input)
        return self.echelon_capture.linear(input, self.bias)

    def _get_name(self) -> str:
        return "Linear"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A capture belongs to this process and weight, so copies and pickles are plain layers. On the meta
        # device, building one draws no random numbers; the state then replaces all of it.
        state = {key: value for key, value in self.__dict__.items() if key != "echelon_capture"}
        return nn.Linear, (1, 1, False, "meta"), state


def eligible(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that can give factors, by name. Call it before adding hooks to the weights."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    compiled = {
        id(inner) for module in model.modules() if is_compiled(module) for inner in module.modules()
    }
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and id(module) not in compiled and _plain(module, owners)
    }


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled this module."""
    dynamo = sys.modules.get("torch._dynamo")  # slow to import, and loaded if anything is compiled
    return module._compiled_call_impl is not None or (
        dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    )


def _plain(layer: nn.Linear, owners: Counter[int]) -> bool:
    """Whether forward is nn.Linear's, with an ordinary trainable weight that no other layer shares."""
    weight = layer._parameters.get("weight")
    return (
        type(weight) is nn.Parameter
        and weight.dtype in (torch.float32, torch.float64)
        and weight.device.type == "cpu"
        and weight.requires_grad
        and weight.numel() > 0
        and owners[id(weight)] == 1
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
        and "forward" not in layer.__dict__
    )


def attach(
    layers: Mapping[str, nn.Linear],
    *,
    scale: Callable[[], float],
    on_ready: Callable[[LinearCapture], None],
) -> dict[str, LinearCapture]:
    """Attach a capture, in watch mode, to each of these layers, in place."""
    captures = {}
    for name, layer in layers.items():
        captures[name] = LinearCapture(name, layer.get_parameter("weight"), scale, on_ready)
        layer.echelon_capture = captures[name]  # type: ignore[assignment]
        layer.__class__ = _Captured
    return captures


def detach(model: nn.Module) -> None:
    """Undo `attach` for all layers of a model."""
    for layer in model.modules():
        release(layer)


def release(layer: nn.Module) -> None:
    """Undo `attach` for one layer, if it is attached."""
    if isinstance(layer, _Captured):
        layer.echelon_capture.close()
        del layer.echelon_capture
        layer.__class__ = nn.Linear  # type: ignore[assignment]


def grad_from(grads: Tensor, inputs: Tensor) -> Tensor:
    """The weight gradient that these rows give."""
    return grads.t() @ inputs
