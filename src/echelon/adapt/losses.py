"""Is the loss that a script trains with a mean over its samples, or a sum?

Follows what `backward` is called on through assignments, functions of the script and criterions. A sum that
is divided by the size of the batch at hand is a mean; a sum that is divided by a constant stays a sum.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from echelon.adapt.things import Things
from echelon.adapt.tree import constant, is_backward, keyword

_LOSS_WORDS = ("loss", "cross_entropy", "kl_div", "CrossEntropy")
_SAME = {"to", "squeeze", "float", "double", "view", "reshape", "contiguous", "scale", "unsqueeze"}


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A part of a loss: how it is reduced over samples, and where that is written."""

    reduction: Literal["mean", "sum"]
    node: ast.expr


class LossTerms:
    """Finds the parts of the losses that a script calls `backward` on."""

    def __init__(self, things: Things) -> None:
        self._things = things
        self._tree = things.tree
        self._seen: set[ast.AST] = set()

    def all(self) -> list[LossTerm]:
        """The parts of all losses."""
        found: list[LossTerm] = []
        for node in self._tree.nodes:
            if isinstance(node, ast.Call) and is_backward(node) and isinstance(node.func, ast.Attribute):
                base = node.func.value
                # fabric.backward(loss), accelerator.backward(loss)
                given = node.args[0] if node.args and isinstance(base, ast.Name) else base
                found += self._terms(given)
        return list({term.node: term for term in found}.values())

    def _terms(self, node: ast.expr) -> Iterator[LossTerm]:
        if node in self._seen:
            return
        self._seen.add(node)
        if isinstance(node, ast.Name):
            yield from self._of_variable(node)
        elif isinstance(node, ast.BinOp):
            yield from self._of_operation(node)
        elif isinstance(node, ast.UnaryOp):
            yield from self._terms(node.operand)
        elif isinstance(node, ast.Call):
            yield from self._of_call(node)

    def _of_variable(self, node: ast.Name) -> Iterator[LossTerm]:
        variable = self._things.find(node)
        for binding in variable.bindings if variable is not None else []:
            if binding.value is not None and binding.index is None:
                yield from self._terms(binding.value)
            elif isinstance(binding.value, ast.Call) and binding.index is not None:
                yield from self._of_functions(binding.value, binding.index)

    def _of_operation(self, node: ast.BinOp) -> Iterator[LossTerm]:
        if isinstance(node.op, ast.Div):
            mean = is_batch_length(node.right)
            for term in self._terms(node.left):
                yield LossTerm("mean", term.node) if mean else term
            return
        if _is_penalty(node.left) or _is_penalty(node.right):
            sides = [side for side in (node.left, node.right) if not _is_penalty(side)]
        else:
            sides = [node.left, node.right]
        for side in sides:
            yield from self._terms(side)

    def _of_call(self, node: ast.Call) -> Iterator[LossTerm]:
        name = self._tree.name(node.func)
        last = name.rpartition(".")[2]
        if name in ("torch.sum", "torch.mean") and len(node.args) == 1 and not node.keywords:
            yield LossTerm("sum" if last == "sum" else "mean", node)
        elif name.startswith("torch.nn.functional.") and any(word in last for word in _LOSS_WORDS):
            yield from _by_reduction(node, node)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("sum", "mean"):
            if node.args or node.keywords:  # over some dimensions only
                yield from self._terms(node.func.value)
            elif not _is_penalty(node):
                yield LossTerm("sum" if node.func.attr == "sum" else "mean", node)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in _SAME:
            yield from self._terms(
                node.args[0] if node.func.attr == "scale" and node.args else node.func.value
            )
        elif self._tree.written(node.func) in self._tree.functions:
            yield from self._of_functions(node, 0)
        else:
            yield from self._of_criterion(node)

    def _of_functions(self, node: ast.Call, index: int) -> Iterator[LossTerm]:
        for function in self._tree.functions.get(self._tree.written(node.func), []):
            for inner in self._tree.body(function):
                if isinstance(inner, ast.Return) and inner.value is not None:
                    value = inner.value
                    if isinstance(value, ast.Tuple):
                        value = value.elts[min(index, len(value.elts) - 1)]
                    yield from self._terms(value)

    def _of_criterion(self, node: ast.Call) -> Iterator[LossTerm]:
        variable = self._things.find(node.func)
        for binding in variable.bindings if variable is not None else []:
            made = binding.value
            name = self._tree.callee(made) if made is not None else ""
            if isinstance(made, ast.Call) and name.startswith("torch.nn.") and name.endswith("Loss"):
                yield from _by_reduction(made, made)


def _by_reduction(call: ast.Call, node: ast.expr) -> Iterator[LossTerm]:
    """What a loss function or class of torch does with the samples."""
    reduction, average = keyword(call, "reduction"), keyword(call, "size_average")
    how = constant(reduction.value) if reduction is not None else "mean"
    if average is not None and constant(average.value) is False:
        how = "sum"
    if how == "sum":
        yield LossTerm("sum", node)
    elif how == "mean":
        yield LossTerm("mean", node)


def is_batch_length(node: ast.expr) -> bool:
    """Whether an expression is the number of samples at hand: len(x), x.size(0), x.shape[0]."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "len":
            return bool(node.args) and isinstance(node.args[0], ast.Name)
        return isinstance(node.func, ast.Attribute) and node.func.attr in ("size", "numel")
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "shape"
    )


def _is_penalty(node: ast.expr) -> bool:
    """Whether an expression is about parameters, not samples."""
    return any(
        isinstance(one, ast.Attribute) and one.attr in ("parameters", "named_parameters", "weight")
        for one in ast.walk(node)
    )
