"""Finds calls of `prepare` whose result is thrown away."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Change, Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rewrite import alone
from echelon.adapt.rule import AdaptRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Unassigned(AdaptRule):
    """A session.prepare(...) without an assignment of what it returns."""

    name: ClassVar[str] = "unassigned"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per call."""
        for call in reading.prepare_calls:
            if alone(reading.tree, call) is None:
                continue
            names = [reading.tree.written(one) for one in call.args]
            what = "the result of prepare is not assigned"
            why = "a loader is replaced by one that draws this worker's share; the old one draws everything"
            known = all(names) and bool(names)
            new = f"{', '.join(names)} = {reading.text.of(call)}"
            changes: tuple[Change, ...] = (Replace(call, new),) if known else ()
            level = "change" if known else "check"
            fix = new if known else "model, optimizer, loader = session.prepare(model, optimizer, loader)"
            if isinstance(call.func, ast.Attribute):
                yield reading.say(self.name, call, level, what, why, fix, changes)  # type: ignore[arg-type]
