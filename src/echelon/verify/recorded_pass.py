"""A model's forward passes, kept so that they can be computed again with the same bits.

When the model is called, its inputs, the random states, its buffers and autocast's setting are noted. When
the backward pass reaches an output, the output's gradient is noted. With these, forward and backward can be
computed again: `again` runs the model on the same inputs and propagates the same gradients of its outputs.
The loss is outside of the model, and is not computed again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(slots=True)
class _Streams:
    """The state of all random numbers of a process."""

    python: object = field(default_factory=random.getstate)
    numpy: Any = field(default_factory=lambda: np.random.get_state(legacy=True))
    torch: Tensor = field(default_factory=torch.get_rng_state)
    cuda: Tensor | None = field(
        default_factory=lambda: torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    )

    def restore(self) -> None:
        random.setstate(self.python)  # type: ignore[arg-type]
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


@dataclass(slots=True)
class _ForwardCall:
    """One forward pass; `gradients` are those of its outputs, once backward has reached them."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]
    streams: _Streams
    buffers: list[Tensor]
    autocast: tuple[bool, torch.dtype]
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def intact(self) -> bool:
        """Whether the inputs are as they were."""
        return self.versions == [tensor._version for tensor in _tensors((self.args, self.kwargs))]


class PassRecorder:
    """Records one model's forward passes while `wanted` says that they may have to be computed again."""

    def __init__(self, model: nn.Module, wanted: Callable[[], bool]) -> None:
        self._model = model
        self._wanted = wanted
        self._open: _ForwardCall | None = None
        self._current: list[_ForwardCall] = []  # those that the last backward pass reached
        self._before: dict[int, Tensor] = {}  # gradients from before that pass
        self._task = -1
        self._calls = 0
        self._replaying = False
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(_Hook(self._entering), with_kwargs=True),
            model.register_forward_hook(_Hook(self._left), with_kwargs=True),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()
        self.forget()

    def forget(self) -> None:
        """Free what was recorded."""
        self._current, self._before, self._open = [], {}, None

    @property
    def ready(self) -> bool:
        """Whether the last backward pass can be computed again."""
        return bool(self._current) and all(call.intact() for call in self._current)

    def _entering(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model is not self._model or self._replaying:
            return
        self._open = None
        if not torch.is_grad_enabled() or not self._wanted():
            return
        kind = next((p.device.type for p in model.parameters()), "cpu")
        self._calls += 1
        self._open = _ForwardCall(
            self._calls,
            args,
            dict(kwargs),
            [tensor._version for tensor in _tensors((args, kwargs))],
            _Streams(),
            [buffer.detach().clone() for buffer in model.buffers()],
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        )

    def _left(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if model is not self._model or self._replaying or self._open is None:
            return
        call, self._open = self._open, None
        for index, tensor in enumerate(_tensors(output)):
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(self._noting(call, index, tensor.output_nr))

    def _noting(self, call: _ForwardCall, index: int, output: int) -> Callable[..., None]:
        def note(gradients: tuple[Tensor | None, ...]) -> None:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                self._begin()
            if not any(call is one for one in self._current):
                self._current.append(call)
                call.gradients = {}
            gradient = gradients[output]
            if gradient is not None:
                call.gradients[index] = gradient

        return note

    def _begin(self) -> None:
        """A backward pass begins: what it adds to is kept."""
        self._current = []
        self._before = {
            id(p): p.grad.clone() for p in self._model.parameters() if p.grad is not None and p.grad.any()
        }

    def again(self) -> dict[int, Tensor]:
        """Compute the last backward pass again; the gradients that parameters should have, by id."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        streams, buffers = _Streams(), [buffer.detach().clone() for buffer in self._model.buffers()]
        outputs: list[Tensor] = []
        gradients: list[Tensor] = []
        computed: list[Tensor | None] = []
        self._replaying = True
        try:
            with torch.enable_grad():
                for call in sorted(self._current, key=lambda one: one.number):
                    found = list(_tensors(self._run(call)))
                    outputs += [found[index] for index in call.gradients]
                    gradients += list(call.gradients.values())
                computed += torch.autograd.grad(outputs, trained, gradients, allow_unused=True)
        finally:
            self._replaying = False
            self._set_buffers(buffers)
            streams.restore()
        expected = {}
        for p, gradient in zip(trained, computed, strict=True):
            before = self._before.get(id(p))
            if gradient is not None:
                expected[id(p)] = gradient if before is None else before + gradient
            elif before is not None:
                expected[id(p)] = before
        return expected

    def _run(self, call: _ForwardCall) -> Any:
        """Not through the model's class, whose calls belong to the script's batches."""
        call.streams.restore()
        self._set_buffers(call.buffers)
        args, kwargs = _detached(call.args), _detached(call.kwargs)
        kind = next((p.device.type for p in self._model.parameters()), "cpu")
        enabled, dtype = call.autocast
        with torch.autocast(kind, dtype=dtype, enabled=enabled):
            return nn.Module.__call__(self._model, *args, **kwargs)

    def _set_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self._model.buffers(), values, strict=True):
            buffer.data.copy_(value)


class _Hook:
    """A hook that copies and pickles of a model do not carry along."""

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        if self._act is not None:
            self._act(*args)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()


def _tensors(data: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts and objects, in order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for one in data:
            yield from _tensors(one)
    elif isinstance(data, dict):
        for one in data.values():
            yield from _tensors(one)
    elif hasattr(data, "__dataclass_fields__"):
        for name in data.__dataclass_fields__:
            yield from _tensors(getattr(data, name))


def _detached(data: Any) -> Any:
    """The same data for a graph of its own."""
    if isinstance(data, Tensor):
        return data.detach().requires_grad_() if data.requires_grad else data
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_detached(one) for one in data))
    if type(data) in (list, tuple):
        return type(data)(_detached(one) for one in data)
    if type(data) is dict:
        return {key: _detached(one) for key, one in data.items()}
    return data
