"""Adds up the figures that a training loop collects on each worker's share."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from echelon.adapt.changes import Insert
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.losses import is_batch_length
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.rules.evaluation import COMBINES

Figure = Literal["count", "sum", "mean", "unclear"]
_SHOWS = {"print", "progress_bar", "set_postfix", "set_description", "info", "write"}
_WHY = {
    "count": "each worker counts on its own share of the data only",
    "sum": "each worker sums over its own share of the data only",
    "mean": "each worker's losses are means over its own share of the data",
    "unclear": "each worker collects it on its own share of the data",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures(AdaptRule):
    """Losses and counts that a training loop adds up and the script uses afterwards."""

    name: ClassVar[str] = "figures"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per figure, and a note if the loop prints figures of its share."""
        told = False
        for loop in reading.loops:
            if loop.statement is None or not loop.trains:
                continue
            settled = set()
            for name, kind, node in _collected(reading, loop.statement):
                settled.add(name)
                yield self._combined(reading, loop.statement, name, kind, node)
            yield from self._deciding(reading, loop.statement, settled)
            printed = _prints(reading, loop.statement)
            if printed is not None and not told:
                told = True
                yield reading.say(
                    self.name,
                    printed,
                    "note",
                    "a loss or count is shown inside the training loop",
                    "echelon run shows what the leader prints: figures of the leader's share of the batch",
                )

    def _deciding(self, reading: Reading, loop: ast.For, settled: set[str]) -> Iterator[ScriptFinding]:
        """Decisions on a figure of this worker's share, which workers would take differently."""
        own = _own(reading, loop) - settled
        for node in _later(reading, loop):
            test = node.test if isinstance(node, (ast.If, ast.While)) else None
            steps = isinstance(node, ast.Call) and _method(node) == "step" and bool(node.args)
            inner = list(ast.walk(test)) if test is not None else list(ast.walk(node)) if steps else []
            names = sorted({one.id for one in inner if isinstance(one, ast.Name)} & own)
            if names:
                what = f"{names[0]} of this worker's share decides what happens"
                why = "workers would decide differently: other learning rates, other numbers of epochs"
                fix = f"decide on {reading.session}.mean({names[0]}.item())"
                yield reading.say(self.name, node, "check", what, why, fix)
                return

    def _combined(
        self, reading: Reading, loop: ast.For, name: str, kind: Figure, node: ast.AugAssign
    ) -> ScriptFinding:
        session = reading.session
        what = f"{name} is added up in the training loop, and used after it"
        torch = reading.tree.imports.get("torch") == "torch"
        if kind == "unclear" or not torch:
            fix = (
                f"after the loop: {session}.all_reduce(tensor) for a sum, {session}.mean(value) for a mean"
            )
            return reading.say(self.name, node, "check", what, _WHY["unclear"], fix)
        line = {
            "count": f"{name} = {session}.all_reduce(torch.tensor({name})).item()",
            "sum": f"{name} = {session}.all_reduce(torch.tensor({name}, dtype=torch.float64)).item()",
            "mean": f"{name} = {session}.mean({name})",
        }[kind]
        return reading.say(
            self.name,
            node,
            "change",
            what,
            _WHY[kind],
            f"after the loop: {line}",
            (Insert(loop, line, "after"),),
        )


def _own(reading: Reading, loop: ast.For) -> set[str]:
    """The names that a loop gives values of this worker's share: losses and accuracies."""
    found = set()
    for statement in loop.body:
        for node in reading.tree.executed(statement):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name) and any(
                        word in target.id.lower() for word in ("loss", "acc")
                    ):
                        found.add(target.id)
    return found


def _collected(reading: Reading, loop: ast.For) -> Iterator[tuple[str, Figure, ast.AugAssign]]:
    """The names that a loop adds to and that are read after it, with how they have to be combined."""
    tree = reading.tree
    inside = [node for statement in loop.body for node in tree.executed(statement)]
    after = [node for node in _later(reading, loop) if isinstance(node, ast.Name)]
    combined = {
        name.id
        for node in _later(reading, loop)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in COMBINES
        for name in ast.walk(node)
        if isinstance(name, ast.Name)
    }
    found: dict[str, list[ast.AugAssign]] = {}
    for node in inside:
        if (
            isinstance(node, ast.AugAssign)
            and isinstance(node.op, ast.Add)
            and isinstance(node.target, ast.Name)
        ):
            found.setdefault(node.target.id, []).append(node)
    for name, additions in found.items():
        used = any(node.id == name and isinstance(node.ctx, ast.Load) for node in after)
        kinds = {_kind(reading, one.value) for one in additions}
        if used and name not in combined and kinds - {None}:
            kind = kinds.pop() if len(kinds) == 1 else "unclear"
            fresh = _reset(reading, loop, additions[0])
            yield name, kind if kind is not None and fresh else "unclear", additions[0]


def _reset(reading: Reading, loop: ast.For, addition: ast.AugAssign) -> bool:
    """Whether a figure begins anew whenever the loop does: it must not be added up twice."""
    around = reading.tree.inside(loop, ast.For, ast.While)
    variable = reading.things.find(addition.target)
    return variable is not None and any(
        reading.tree.inside(binding.statement, ast.For, ast.While) is around
        and reading.tree.scope(binding.statement) is reading.tree.scope(loop)
        for binding in variable.bindings
    )


def _later(reading: Reading, loop: ast.For) -> Iterator[ast.AST]:
    """What the function of a loop runs after it."""
    scope = reading.tree.scope(loop)
    for statement in scope.body:
        for node in reading.tree.executed(statement):
            if getattr(node, "lineno", 0) > (loop.end_lineno or 0):
                yield node


def _kind(reading: Reading, value: ast.expr) -> Figure | None:
    """How what is added has to be combined; None if it is the same on all workers, or about time."""
    nodes = list(ast.walk(value))
    number = any(isinstance(one, ast.Call) and _method(one) in ("item", "float", "int") for one in nodes)
    if is_batch_length(value):
        return "count"
    if any(isinstance(one, ast.Compare) or _method(one) in ("eq", "count_nonzero") for one in nodes):
        return "count" if number else "unclear"
    names = " ".join(one.id.lower() for one in nodes if isinstance(one, ast.Name))
    if not number:
        return "unclear" if "loss" in names or "correct" in names else None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return "sum" if is_batch_length(value.left) or is_batch_length(value.right) else "unclear"
    if reading.sums:
        return "sum"
    return "unclear" if any(_method(one) == "sum" for one in nodes) else "mean"


def _method(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _prints(reading: Reading, loop: ast.For) -> ast.Call | None:
    """A call in the loop that prints a figure."""
    for statement in loop.body:
        for node in reading.tree.executed(statement):
            if isinstance(node, ast.Call) and _method(node) in _SHOWS:
                inner = [one for argument in [*node.args, *node.keywords] for one in ast.walk(argument)]
                names = [one.id.lower() for one in inner if isinstance(one, ast.Name)]
                if any(_method(one) == "item" for one in inner) or any("loss" in name for name in names):
                    return node
    return None
