"""How does a backward pass get the weight of its own batch, whatever was drawn since?

Tensors that a prepared loader hands out are known, by identity and as the base of views. A prepared
model's forward pass looks for them among its inputs, and marks its outputs with the batch (batches.py has
the rules). In the backward pass, the gradient that reaches a marked output tells the batch: the first one
in a pass sets the weight; an output of a batch with another weight has its gradient scaled by the ratio, so
that a loss over several batches is exact too. Gradients that go on from the model to its inputs are scaled
back.

Nothing is attached with a single worker, nor to a compiled model, whose passes are assigned by draws alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from echelon.errors import DataError
from echelon.train.batches import BatchTracker, Belongs, HandedBatch
from echelon.train.linear import is_compiled

_UNKNOWN: tuple[Callable[[], Tensor | None], HandedBatch | None] = (lambda: None, None)
_MOST_TENSORS = 64  # in one batch, or among one model's inputs; more are not looked at


class LossWeights:
    """Weighs the backward passes of one worker.

    weigh     sets the weight of this worker's loss, and the size of the global batch
    where     where this worker is, for errors
    entering  called with a model and what it is given when its forward pass begins
    strange   called when the gradient of a model's output is not finite
    """

    def __init__(
        self,
        weigh: Callable[[float, int], None],
        where: Callable[[], str],
        *,
        entering: Callable[[nn.Module, tuple[Any, ...]], None] = lambda module, given: None,
        strange: Callable[[], None] = lambda: None,
    ) -> None:
        self._weigh = weigh
        self._where = where
        self._entering = entering
        self._strange = strange
        self._tracker = BatchTracker()
        self._known: dict[int, tuple[weakref.ref[Tensor], HandedBatch | None]] = {}  # None: of several
        self._models: list[nn.Module] = []
        self._marked: set[int] = set()  # models whose outputs are marked
        self._undo: dict[type[nn.Module], Callable[[], None]] = {}
        self._inside = False  # a model's forward pass
        self._in_use: HandedBatch | None = None
        self._resolved = False  # the weight of the current backward pass is set
        self._weighed = False  # a backward pass since the last step has set the weight
        self._told = False  # the script has set the weight itself
        self._told_for: HandedBatch | None = None

    # Draws ---------------------------------------------------------------------------------------

    def drew(self, batch: HandedBatch, data: Any) -> None:
        """A loader hands out this batch."""
        self._told = False
        if not self.trains:
            return
        for tensor in _tensors(data):
            self._know(tensor, batch)
            base = tensor._base
            if base is not None:
                several = id(base) in self._known and self._find(base) is not batch
                self._know(base, None if several else batch)
        self._tracker.drew(batch)

    def _know(self, tensor: Tensor, batch: HandedBatch | None) -> None:
        key, known = id(tensor), self._known
        known[key] = weakref.ref(tensor, lambda _: known.pop(key, None)), batch

    @property
    def trains(self) -> bool:
        """Whether what is drawn now may be trained: not in an evaluation."""
        return torch.is_grad_enabled() and (not self._models or any(m.training for m in self._models))

    def pass_begins(self, loader: int) -> None:
        """A pass over a loader begins: forget its earlier batches that nobody holds any more."""
        held = {id(batch) for _, batch in self._known.values()}
        self._tracker.forget(lambda batch: batch.loader == loader and id(batch) not in held)

    # Models --------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, *, marks: bool = True) -> None:
        """Mark the outputs of a model's forward passes from now on; a summed loss needs no weight."""
        self._models.append(model)
        if not marks or any(is_compiled(module) for module in model.modules()):
            return
        if isinstance(model, torch.jit.ScriptModule):
            return
        self._marked.add(id(model))
        for kind in _classes_of(model):
            if kind not in self._undo:
                self._undo[kind] = _intercept_calls(kind, self)

    def detach(self) -> None:
        """Leave all models as they were."""
        self._marked.clear()
        for undo in self._undo.values():
            undo()
        self._undo.clear()

    def call(self, model: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module of a class that is intercepted."""
        if self._inside or id(model) not in self._marked or torch.compiler.is_compiling():
            return inner(*args, **kwargs)
        self._inside = True
        try:
            self._entering(model, args)
            if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
                return inner(*args, **kwargs)
            entry, back = self._enter(args, kwargs)
            if entry is None:
                return inner(*args, **kwargs)
            if back:
                args, kwargs = _change(
                    (args, kwargs), lambda tensor: self._mark(tensor, entry, inverse=True)
                )
            output = inner(*args, **kwargs)
            if isinstance(output, Tensor) and output.grad_fn is not None:  # no other output depends on it
                output.register_hook(lambda grad: self._scaled(grad, entry, False))
                return output
            return _change_output(output, lambda tensor: self._mark(tensor, entry))
        finally:
            self._inside = False

    def _enter(self, args: Any, kwargs: Any) -> tuple[Belongs | None, bool]:
        """The batch of a forward pass with these inputs, and whether gradients go on to the inputs."""
        found: list[HandedBatch] = []
        back = False
        for tensor in _tensors((args, kwargs)):
            batch = self._find(tensor)
            if batch is not None and batch not in found:
                found.append(batch)
            back = back or tensor.requires_grad
        return self._tracker.entered(found), back

    def _find(self, tensor: Tensor) -> HandedBatch | None:
        """The batch that a tensor, or the one that it is a view of, belongs to."""
        for one in (tensor, tensor._base):
            reference, batch = self._known.get(id(one), _UNKNOWN)
            if batch is not None and reference() is one:
                return batch
        return None

    def _mark(self, tensor: Tensor, entry: Belongs, *, inverse: bool = False) -> Tensor:
        """The same tensor for autograd, with a node of its own, whose gradient is scaled."""
        marked = tensor.view_as(tensor)
        marked.register_hook(lambda grad: self._scaled(grad, entry, inverse))
        return marked

    # Backward ------------------------------------------------------------------------------------

    def tell(self) -> None:
        """The script has set the weight itself: for the next batch that is trained, until the next draw."""
        self._told, self._told_for = True, None

    def resolve(self) -> None:
        """Set the weight of this backward pass, if no marked output has: gradients are about to be used."""
        if self._resolved or self._told or torch._C._current_graph_task_id() < 0:
            return
        self._resolve()

    def stepping(self) -> None:
        """An optimizer is about to step: set the weight if no backward pass since the last step has."""
        if not self._weighed and not self._told:
            self._resolve()
        self._weighed = False

    def _resolve(self) -> None:
        belongs = self._tracker.entered(())
        if belongs is not None:  # else no prepared loader: the mean over workers, as it was set at first
            self._use(belongs)

    def _scaled(self, grad: Tensor, entry: Belongs, inverse: bool) -> Tensor | None:
        if not self._resolved:
            self._begin(entry)
            if not inverse and not math.isfinite(grad.sum().item()):
                self._strange()
        in_use = self._in_use
        if self._told or in_use is None or entry.batch is in_use or entry.batch.agrees(in_use):
            return None
        self._refuse_ambiguous(entry)
        ratio = entry.batch.weight / in_use.weight
        return grad / ratio if inverse else grad * ratio

    def _begin(self, entry: Belongs) -> None:
        """The first marked output of a backward pass."""
        if self._told and self._told_for in (None, entry.batch):
            self._told_for, self._resolved = entry.batch, True
            _at_end_of_backward(self._over)
        else:
            self._told = False
            self._use(entry)

    def _use(self, belongs: Belongs) -> None:
        self._refuse_ambiguous(belongs)
        self._in_use = belongs.batch
        self._resolved = self._weighed = True
        _at_end_of_backward(self._over)
        self._weigh(belongs.batch.weight, belongs.batch.batch)

    def _over(self) -> None:
        """The backward pass is over."""
        self._resolved = False

    def _refuse_ambiguous(self, belongs: Belongs) -> None:
        if belongs.others:
            could = "; or ".join(str(batch) for batch in (belongs.batch, *belongs.others))
            raise DataError(
                "cannot tell which batch this backward pass is of, and so how much its loss weighs: "
                f"{could}",
                where=self._where(),
                fix="give the model the loader's own tensors (change them inside the model), or call "
                "session.weigh(number of samples) before backward()",
            )


def _classes_of(model: nn.Module) -> list[type[nn.Module]]:
    """The class of a model, and the one that it may get again while it trains: see linear.py."""
    kind = type(model)
    return list(dict.fromkeys((kind, next(one for one in kind.__mro__ if not _is_own(one)))))


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith("echelon.train.")


def _intercept_calls(kind: type[nn.Module], weights: LossWeights) -> Callable[[], None]:
    """Let `weights` see the calls of a class's modules; returns how to undo it.

    Not by a hook of the module: copies and pickles of a module have its hooks, and are no part of the run.
    """
    own: Callable[..., Any] | None = vars(kind).get("__call__")
    known = weakref.ref(weights)

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        inner = functools.partial(own, module) if own is not None else super(kind, module).__call__
        active = known()
        return inner(*args, **kwargs) if active is None else active.call(module, inner, args, kwargs)

    kind.__call__ = call  # type: ignore[method-assign]

    def undo() -> None:
        if vars(kind).get("__call__") is not call:
            return  # somebody has replaced it since; ours passes calls on
        if own is None:
            del kind.__call__
        else:
            kind.__call__ = own  # type: ignore[method-assign]

    return undo


def _at_end_of_backward(call: Callable[[], None]) -> None:
    """Call when the current backward pass ends; now, if there is none."""
    if torch._C._current_graph_task_id() >= 0:
        torch.autograd.Variable._execution_engine.queue_callback(call)
    else:
        call()


def _tensors(data: Any) -> Iterator[Tensor]:
    """The first tensors in tuples, lists, dicts and objects."""
    stack, left = [data], _MOST_TENSORS
    while stack and left:
        one = stack.pop()
        if isinstance(one, Tensor):
            left -= 1
            yield one
        elif isinstance(one, (list, tuple)):
            stack += one[:_MOST_TENSORS]
        elif isinstance(one, dict):
            stack += list(one.values())[:_MOST_TENSORS]
        elif not isinstance(one, (str, bytes, int, float, nn.Module)) and hasattr(one, "__dict__"):
            stack += [value for value in vars(one).values() if isinstance(value, Tensor)]


def _change(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tuples, lists and dicts with every tensor that has a gradient changed."""
    if isinstance(data, Tensor):
        return change(data) if data.requires_grad else data
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_change(value, change) for value in data))
    if type(data) in (list, tuple):
        return type(data)(_change(value, change) for value in data)
    if type(data) is dict:
        return {key: _change(value, change) for key, value in data.items()}
    return data


def _change_output(data: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Also in an object of the user's class, which the model has just made: it keeps its identity."""
    if isinstance(data, dict) and type(data) is not dict:
        for key, value in list(data.items()):
            data[key] = _change(value, change)
        return data
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            with contextlib.suppress(AttributeError):  # frozen: its passes are assigned by draws alone
                setattr(data, field.name, _change(getattr(data, field.name), change))
        return data
    return _change(data, change)
