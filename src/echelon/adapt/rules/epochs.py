"""Lets the session count the epochs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Change, Insert, Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.tree import constant

_WHY = (
    "the record then has epochs, a loaded checkpoint continues with the right one, and policies other than "
    "full know when training ends"
)
_PROGRESS = {"tqdm.tqdm", "tqdm.auto.tqdm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs(AdaptRule):
    """Loops over epochs that the session does not count."""

    name: ClassVar[str] = "epochs"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per loop over epochs."""
        loops = list(epoch_loops(reading))
        if len(loops) > 1 or any(_called_twice(reading, loop) for loop in loops):
            what = "epochs are counted by several loops, or by one that runs several times"
            fix = "they work as they are; session.epochs is for one loop: it counts on where it stopped"
            yield reading.say(self.name, loops[0], "note", what, _WHY, fix)
            return
        for loop in loops:
            counted = loop.iter
            if reading.tree.callee(counted) in _PROGRESS and isinstance(counted, ast.Call) and counted.args:
                counted = counted.args[0]
            if reading.tree.callee(counted) != "range" or not isinstance(counted, ast.Call):
                continue
            yield self._counted(reading, loop, counted)

    def _counted(self, reading: Reading, loop: ast.For, call: ast.Call) -> ScriptFinding:
        written = reading.source(call)
        if not reading.visible(loop):
            what = f"epochs are counted by {written}, where {reading.session} is not known"
            fix = f"it works as it is; with the session as an argument: {reading.session}.epochs(...)"
            return reading.say(self.name, loop, "note", what, _WHY, fix)
        count, first = _count(reading, call)
        if not count or not isinstance(loop.target, ast.Name):
            what = f"epochs are counted by {written}, which begins at a number of the script's own"
            fix = f"it works as it is; with {reading.session}.load: {reading.session}.epochs(...)"
            return reading.say(self.name, loop, "note", what, _WHY, fix)
        new = f"{reading.session}.epochs({count})"
        changes: tuple[Change, ...] = (Replace(call, new),)
        fix = f"for {loop.target.id} in {new}"
        name = loop.target.id
        if first and any(
            isinstance(node, ast.Name) and node.id == name for one in loop.body for node in ast.walk(one)
        ):
            changes += (Insert(loop.body[0], f"{name} += 1  # the session counts from 0", "before"),)
            fix += f", and {name} += 1 below, since the session counts from 0"
        return reading.say(
            self.name, loop, "change", f"epochs are counted by {written}", _WHY, fix, changes
        )


def epoch_loops(reading: Reading) -> Iterator[ast.For]:
    """The outermost loops that train, if they count epochs: by name, or with a loop over data inside."""
    tree = reading.tree
    data = [loop.node for loop in reading.roles.loops]
    for node in tree.nodes:
        if not isinstance(node, ast.For) or node in data or not tree.trains(node):
            continue
        if tree.inside(node, ast.For, ast.While) is not None or _called_in_loop(reading, node):
            continue
        named = isinstance(node.target, ast.Name) and "epoch" in node.target.id.lower()
        if named or any(inner in data for inner in tree.run_by(*node.body)):
            yield node


def _called_twice(reading: Reading, node: ast.AST) -> bool:
    scope = reading.tree.scope(node)
    return not isinstance(scope, ast.Module) and len(reading.tree.callers(scope)) > 1


def _called_in_loop(reading: Reading, node: ast.AST) -> bool:
    scope = reading.tree.scope(node)
    if isinstance(scope, ast.Module):
        return False
    return any(reading.tree.inside(call, ast.For, ast.While) for call in reading.tree.callers(scope))


def _count(reading: Reading, call: ast.Call) -> tuple[str, int]:
    """How many epochs a range has, as an expression, and its first number; empty if that is not plain."""
    if len(call.args) == 1 and not call.keywords:
        return reading.text.of(call.args[0]), 0
    if len(call.args) != 2 or constant(call.args[0]) not in (0, 1):
        return "", 0
    first, stop = constant(call.args[0]), call.args[1]
    if first == 0:
        return reading.text.of(stop), 0
    last = constant(stop)
    if isinstance(last, int) and last > 1:
        return str(last - 1), 1
    plus = isinstance(stop, ast.BinOp) and isinstance(stop.op, ast.Add)
    if plus and isinstance(stop, ast.BinOp) and constant(stop.right) == 1:
        return reading.text.of(stop.left), 1
    if plus and isinstance(stop, ast.BinOp) and constant(stop.left) == 1:
        return reading.text.of(stop.right), 1
    return "", 0
