"""Finds the batch size where the number of samples at hand is meant."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.losses import is_batch_length
from echelon.adapt.reading import Reading
from echelon.adapt.roles import LoaderLoop
from echelon.adapt.rule import AdaptRule
from echelon.adapt.things import Variable
from echelon.adapt.tree import constant, keyword

_WHY = (
    "batch_size is the batch of all workers together, and a worker's share is smaller: shapes do not fit, "
    "or more is drawn than was meant"
)
_MAKERS = {
    "randn", "rand", "zeros", "ones", "full", "empty", "randint", "normal", "new_zeros", "new_ones",
    "new_full", "new_empty", "FloatTensor", "LongTensor",
}  # fmt: skip
_SHAPERS = {"view", "reshape", "expand", "repeat"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeInShape(AdaptRule):
    """Batch sizes that are written into shapes: view(batch_size, -1), init_hidden(batch_size)."""

    name: ClassVar[str] = "batch-size"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call that has the batch size in its shape."""
        sizes = [size for loader in reading.prepared_loaders for size in _sizes(reading, loader)]
        seen: set[ast.AST] = set()
        for loop in reading.loops:
            if not loop.trains:
                continue
            names = reading.roles.batch_names(loop)
            for call in _region(reading, loop):
                if call in seen or not any(_has(reading, call, size) for size in sizes):
                    continue
                seen.add(call)
                instead = f"{names[0]}.size(0)" if names else "x.size(0) of the batch at hand"
                what = f"the batch size is part of a shape: {reading.source(call)}"
                yield reading.say(self.name, call, "check", what, _WHY, f"write {instead} in its place")


def _sizes(reading: Reading, loader: Variable) -> Iterator[ast.expr]:
    """The batch sizes that a loader is made with."""
    for binding in loader.bindings:
        for call in ast.walk(binding.value) if binding.value is not None else ():
            if isinstance(call, ast.Call) and reading.things.kind(call) == "loader":
                given = keyword(call, "batch_size")
                size = given.value if given is not None else call.args[1] if len(call.args) > 1 else None
                number = constant(size)
                named = isinstance(size, (ast.Name, ast.Attribute))
                if size is not None and (named or (isinstance(number, int) and number > 1)):
                    yield size


def _region(reading: Reading, loop: LoaderLoop) -> Iterator[ast.Call]:
    """The calls in a loop and in what it runs, in its function, and in the forward passes of the script."""
    tree = reading.tree
    nodes = list(tree.run_by(loop.node))
    scope = tree.scope(loop.node)
    at_home = reading.home is not None and scope is reading.home.scope
    if not isinstance(scope, ast.Module) and not at_home:
        nodes += tree.body(scope)
    for name in tree.modules:
        for function in tree.methods(tree.classes[name], "forward"):
            nodes += tree.body(function)
    if at_home or isinstance(scope, ast.Module):  # states that are made before the loop
        nodes += [one for one in tree.nodes if isinstance(one, ast.Call) and "hidden" in _last(one)]
    yield from (node for node in dict.fromkeys(nodes) if isinstance(node, ast.Call))


def _last(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _has(reading: Reading, call: ast.Call, size: ast.expr) -> bool:
    """Whether a call makes or shapes a tensor with the batch size."""
    last = _last(call)
    if last not in _MAKERS | _SHAPERS and "hidden" not in last:
        return False
    given = list(call.args)
    if given and isinstance(given[0], (ast.Tuple, ast.List)):
        given = [*given[0].elts, *given[1:]]
    if isinstance(size, ast.Constant):
        return bool(given) and constant(given[0]) == size.value
    return any(_same(reading, one, size) for one in given)


def _same(reading: Reading, one: ast.expr, size: ast.expr) -> bool:
    if not isinstance(one, type(size)) or reading.tree.written(one) != reading.tree.written(size):
        return False
    variable = reading.things.find(one)
    if isinstance(size, ast.Attribute):
        return True
    if variable is None or variable is not reading.things.find(size):
        return False
    return not any(
        binding.value is not None and is_batch_length(binding.value) for binding in variable.bindings
    )
