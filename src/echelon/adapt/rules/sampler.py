"""Takes out DistributedSampler: a prepared loader shares the data out itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Change, Cut, Remove, Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import add_argument, alone
from echelon.adapt.rule import AdaptRule
from echelon.adapt.things import LOADERS, SAMPLERS
from echelon.adapt.tree import constant, keyword

_WHY = "a prepared loader shares every batch out itself, and draws another order in every pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers(AdaptRule):
    """DistributedSampler and its set_epoch."""

    name: ClassVar[str] = "sampler"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per sampler, per loader that has one, and per call of set_epoch."""
        if reading.flavour != "ddp":
            return
        direct = set()
        for loader in reading.tree.calls(*LOADERS):
            given = keyword(loader, "sampler")
            if given is None:
                continue
            sampler = self._sampler(reading, given.value)
            if sampler is not None:
                if sampler is given.value:
                    direct.add(sampler)
                yield self._loader(reading, loader, given, sampler)
        for sampler in reading.tree.calls(*SAMPLERS):
            if sampler not in direct:
                yield self._alone(reading, sampler)
        yield from self._set_epoch(reading)

    def _sampler(self, reading: Reading, node: ast.expr) -> ast.Call | None:
        """The DistributedSampler that an argument is, or that its variable holds."""
        if reading.tree.callee(node) in SAMPLERS and isinstance(node, ast.Call):
            return node
        variable = reading.things.find(node)
        for binding in variable.bindings if variable is not None else []:
            if isinstance(binding.value, ast.Call) and reading.tree.callee(binding.value) in SAMPLERS:
                return binding.value
        return None

    def _loader(
        self, reading: Reading, loader: ast.Call, given: ast.keyword, sampler: ast.Call
    ) -> ScriptFinding:
        """The loader without the sampler, and with `shuffle` if the sampler shuffled."""
        told, own = keyword(sampler, "shuffle"), keyword(loader, "shuffle")
        shuffles = told is None or constant(told.value) is not False
        variable = reading.things.find(given.value)
        kept = variable is not None and len(variable.bindings) > 1
        changes: list[Change] = []
        if kept:  # the variable is None otherwise: so it is now, and `shuffle=(sampler is None)` is right
            follows = own is not None and variable is not None and _names(own.value, variable.name)
            if shuffles and not follows:
                changes.append(_shuffled(reading, loader, own))
        elif own is not None and shuffles:
            changes += [Cut(loader, given), Replace(own, "shuffle=True")]
        elif own is not None:
            changes += [Cut(loader, given), Replace(own, "shuffle=False")]
        else:
            changes.append(Replace(given, f"shuffle={shuffles}"))
        what = "the loader has a DistributedSampler"
        fix = f"shuffle={shuffles}"
        return reading.say(self.name, loader, "change", what, _WHY, fix, tuple(changes))

    def _alone(self, reading: Reading, sampler: ast.Call) -> ScriptFinding:
        statement = reading.tree.statement(sampler)
        variable = next(
            (
                one
                for one in reading.things.variables
                if any(binding.value is sampler for binding in one.bindings)
            ),
            None,
        )
        change: Change = Replace(sampler, "None")
        if variable is not None and len(variable.bindings) == 1 and _only_in_loader(reading, variable.name):
            change = Remove(statement)
        return reading.say(
            self.name, sampler, "change", "a DistributedSampler is made", _WHY, "left out", (change,)
        )

    def _set_epoch(self, reading: Reading) -> Iterator[ScriptFinding]:
        for node in reading.tree.nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "set_epoch"
            ):
                statement = alone(reading.tree, node)
                changes: tuple[Change, ...] = (Remove(statement),) if statement is not None else ()
                level = "change" if changes else "check"
                what = "set_epoch changes the order of samples"
                yield reading.say(self.name, node, level, what, _WHY, "left out", changes)  # type: ignore[arg-type]


def _shuffled(reading: Reading, loader: ast.Call, own: ast.keyword | None) -> Change:
    if own is not None:
        return Replace(own, "shuffle=True")
    return add_argument(reading.text, loader, "shuffle=True")


def _names(node: ast.AST, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))


def _only_in_loader(reading: Reading, name: str) -> bool:
    """Whether a sampler's variable is read by loaders and set_epoch only."""
    for use in reading.tree.uses(name):
        outer = next(reading.tree.parents(use))
        loader = isinstance(outer, ast.keyword) and outer.arg == "sampler"
        counts = isinstance(outer, ast.Attribute) and outer.attr == "set_epoch"
        if not loader and not counts and not _in_shuffle(reading, use):
            return False
    return True


def _in_shuffle(reading: Reading, node: ast.AST) -> bool:
    return any(isinstance(one, ast.keyword) and one.arg == "shuffle" for one in reading.tree.parents(node))
