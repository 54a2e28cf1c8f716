"""Any module as a chain of its operations, traced with torch.fx.

Tracing runs `forward` once with placeholders. A submodule that cannot be traced, because it decides by
values, stays whole; the model's own forward cannot. Values that later layers use are handed over from
stage to stage, so connections may skip stages. Parameters and buffers are read where they are used, and
inputs of the model are known to every stage: neither is handed over.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from echelon.errors import ModelError
from echelon.parallel.chain import Given, LayerChain, is_in_place, names_in

_LEFT_TO_TORCH = (TypeError, ValueError, RuntimeError, AttributeError, NameError, AssertionError, KeyError)


class _LayerTracer(fx.Tracer):
    """Keeps submodules whole that cannot be traced."""

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = list(self.graph.nodes)[-1] if len(self.graph.nodes) else None
        try:
            return super().call_module(m, forward, args, kwargs)
        except (fx.proxy.TraceError, *_LEFT_TO_TORCH):
            for node in reversed(list(self.graph.nodes)):
                if node is before:
                    break
                self.graph.erase_node(node)
            return self.create_proxy("call_module", self.path_of_module(m), args, kwargs)


class TracedLayers(LayerChain):
    """The operations of a traced module. Placeholders, attributes and the output are no layers."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._signature = _signature(model)
        graph = _graph(model, self._signature)
        self._placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in graph.nodes if node.op == "output")
        skipped = ("placeholder", "get_attr", "output")
        self._nodes = [node for node in graph.nodes if node.op not in skipped]
        at = {node: index for index, node in enumerate(self._nodes)}
        self.names = [_name(node) for node in self._nodes]
        self._last_use = {node: max((_use(user, at) for user in node.users), default=-1) for node in at}
        self._carried = [self._live(boundary) for boundary in range(len(self._nodes) + 1)]
        changed = {index: set(_changed(model, node)) for index, node in enumerate(self._nodes)}
        self.closed = frozenset(
            boundary
            for boundary in range(1, len(self._nodes))
            if any(
                changed[index] & set(self._carried[boundary]) for index in range(boundary, len(self._nodes))
            )
        )

    def _live(self, boundary: int) -> list[fx.Node]:
        """The values that exist before a boundary and are used after it, in order."""
        return [node for node in self._nodes[:boundary] if self._last_use[node] >= boundary]

    def run(self, begin: int, end: int, given: Given, carried: Sequence[Any]) -> tuple[Any, ...]:
        """Run the operations in their order."""
        known: dict[fx.Node, Any] = dict(zip(self._carried[begin], carried, strict=True))
        known.update(zip(self._placeholders, self._bind(given), strict=True))

        def value(node: fx.Node) -> Any:
            return _attribute(self._model, str(node.target)) if node.op == "get_attr" else known[node]

        for index in range(begin, end):
            node = self._nodes[index]
            args = fx.node.map_arg(node.args, value)
            kwargs = fx.node.map_arg(node.kwargs, value)
            known[node] = _call(self._model, node, args, kwargs)
            for used in node.all_input_nodes:
                if self._last_use.get(used, end) <= index:
                    known.pop(used, None)
        if end == len(self._nodes):
            return (fx.node.map_arg(self._output.args[0], value),)
        return tuple(known[node] for node in self._carried[end])

    def _bind(self, given: Given) -> list[Any]:
        args, kwargs = given
        bound = self._signature.bind(*args, **kwargs)
        for name, parameter in self._signature.parameters.items():
            if name in bound.arguments and parameter.default is not inspect.Parameter.empty:
                got = bound.arguments[name]
                if got is not parameter.default and not _equal(got, parameter.default):
                    raise ModelError(
                        f"argument {name} of the model's forward has another value than its default, "
                        "for which the model was traced",
                        where=f"forward of {type(self._model).__name__}",
                        fix=f"make {name} an argument without a default, or leave it at its default",
                    )
        bound.apply_defaults()
        return list(bound.arguments.values())

    def holds(self, begin: int, end: int) -> set[str]:
        """What the operations' modules hold, and attributes that they read."""
        found: set[str] = set()
        nodes = self._nodes[begin:end] + ([self._output] if end == len(self._nodes) else [])
        for node in nodes:
            if node.op == "call_module":
                module = self._model.get_submodule(str(node.target))
                found.update(f"{node.target}.{name}" for name in names_in(module))
            found.update(str(one.target) for one in node.all_input_nodes if one.op == "get_attr")
        return found


def _equal(one: object, other: object) -> bool:
    """Whether two plain values are equal; tensors are not compared."""
    plain = (bool, int, float, str, type(None), torch.dtype)
    return isinstance(one, plain) and isinstance(other, plain) and one == other


def _signature(model: nn.Module) -> inspect.Signature:
    signature = inspect.signature(model.forward)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise ModelError(
            f"the forward of {type(model).__name__} takes any number of arguments, so it cannot be traced",
            where="prepare, parallel",
            fix="name its arguments, or build the model as nn.Sequential",
        )
    return signature


def _graph(model: nn.Module, signature: inspect.Signature) -> fx.Graph:
    defaults = {
        name: parameter.default
        for name, parameter in signature.parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    try:
        return _LayerTracer().trace(model, concrete_args=defaults or None)
    except (fx.proxy.TraceError, *_LEFT_TO_TORCH) as error:
        raise ModelError(
            f"the forward of {type(model).__name__} decides by values, so it cannot be cut into stages: "
            f"{error}",
            where="prepare, parallel",
            fix="move what decides into a submodule, which then stays whole; or build the model as "
            "nn.Sequential",
        ) from error


def _use(user: fx.Node, at: dict[fx.Node, int]) -> int:
    return at.get(user, len(at))  # the output comes after all layers


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def _changed(model: nn.Module, node: fx.Node) -> list[fx.Node]:
    """The values that an operation changes in place."""
    inputs = [one for one in node.args if isinstance(one, fx.Node)][:1]
    if node.op == "call_module":
        return inputs if is_in_place(model.get_submodule(str(node.target))) else []
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if node.kwargs.get("inplace") or in_place or node.target in (operator.setitem, operator.iadd):
        return inputs
    return []


def _attribute(model: nn.Module, target: str) -> Any:
    found: Any = model
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _call(model: nn.Module, node: fx.Node, args: Any, kwargs: Any) -> Any:
    if node.op == "call_module":
        return model.get_submodule(str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
