"""Makes model, optimizer and the loader of training part of the run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Insert
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.home import Home, PrepareCall
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule

_WHY = (
    "each worker then draws its share of every batch, and backward() returns the gradient of the whole "
    "batch; models and optimizers stay the same objects"
)
_WIDTH = 100
_BY_HAND = "after they are made: model, optimizer, loader = session.prepare(model, optimizer, loader)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparing(AdaptRule):
    """Models, optimizers and training loaders that are not prepared."""

    name: ClassVar[str] = "prepare"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call of `prepare` that is added."""
        if reading.flavour not in ("plain", "ddp") or not reading.trains:
            return
        home = reading.home
        if home is None or home.problem:
            node = home.block[0] if home is not None else reading.tree.module
            what = home.problem if home is not None else "no model and optimizer were found in this file"
            yield reading.say(self.name, node, "check", what, _WHY, _BY_HAND)
            return
        for call in home.calls:
            yield self._prepared(reading, home, call)
        for loader in home.strangers:
            for binding in loader.bindings:
                if _repeats(reading, binding.statement):
                    what = f"{loader.name} is made again and again, and not prepared"
                    fix = "make it once, before the loop, and prepare it there"
                    yield reading.say(self.name, binding.statement, "check", what, _WHY, fix)
                else:
                    call = PrepareCall((loader.name,), binding.statement)
                    yield self._prepared(reading, home, call)

    def _prepared(self, reading: Reading, home: Home, call: PrepareCall) -> ScriptFinding:
        line = self._line(reading, home, call)
        names = (
            " and ".join([", ".join(call.names[:-1]), call.names[-1]]) if call.names[1:] else call.names[0]
        )
        return reading.say(
            self.name,
            call.anchor,
            "change",
            f"{names} {'are' if call.names[1:] else 'is'} not prepared",
            _WHY,
            " ".join(line.split()).replace("( ", "(").replace(" )", ")"),
            (Insert(call.anchor, line, call.where),),
        )

    def _line(self, reading: Reading, home: Home, call: PrepareCall) -> str:
        loaders = {one.name for one in [*home.loaders, *home.strangers]}
        models = {one.name for one in home.models}
        options = ""
        if reading.flavour == "ddp" and loaders & set(call.names):
            options += ', batch="per-worker"'
        if reading.sums and reading.flavour == "plain" and models & set(call.names):
            options += ', loss="sum"'
        names = ", ".join(call.names)
        line = f"{names} = {reading.session}.prepare({names}{options})"
        if len(line) <= _WIDTH:
            return line
        return f"{names} = {reading.session}.prepare(\n{reading.text.indent}{names}{options}\n)"


def _repeats(reading: Reading, node: ast.AST) -> bool:
    """Whether a node is in a loop, or in a function that is called more than once."""
    tree = reading.tree
    scope = tree.scope(node)
    calls = [] if isinstance(scope, ast.Module) else tree.callers(scope)
    return any(tree.inside(one, ast.For, ast.While) for one in [node, *calls]) or len(calls) > 1
