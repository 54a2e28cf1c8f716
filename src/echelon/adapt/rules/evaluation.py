"""Looks at loops that evaluate: over a share of the data, figures have to be combined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.roles import LoaderLoop
from echelon.adapt.rule import AdaptRule

COMBINES = {
    "all_reduce", "mean", "gather_for_metrics", "all_gather", "gather", "reduce", "compute",
    "all_gather_object", "on_leader",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluating(AdaptRule):
    """Evaluation over a share of the data, or over all of it on every worker."""

    name: ClassVar[str] = "evaluation"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per loop over shared data, one per loader that every worker reads whole."""
        if not reading.trains:
            return
        shared = reading.loops
        for loop in shared:
            if not loop.trains and isinstance(loop.node, ast.For) and not _combines(reading, loop):
                yield self._share(reading, loop)
        told: set[str] = set()
        for loop in reading.roles.loops:
            name = loop.variables[0].name
            if loop.trains or loop in shared or name in told or not isinstance(loop.node, ast.For):
                continue
            told.add(name)
            yield reading.say(
                self.name,
                loop.node,
                "note",
                f"every worker evaluates all of {name}",
                "figures are right on every worker, and it takes as long as alone",
                f"to share the work: prepare {name} too, and combine figures with "
                f"{reading.session}.gather_for_metrics(outputs, targets)",
            )

    def _share(self, reading: Reading, loop: LoaderLoop) -> ScriptFinding:
        name = loop.variables[0].name
        return reading.say(
            self.name,
            loop.node,
            "check",
            f"figures are computed over {name}, of which each worker draws its share only",
            "sums and counts are those of one worker; divided by len(dataset) they are too small",
            f"before counting: outputs, targets = {reading.session}.gather_for_metrics(outputs, targets); "
            f"or after the loop: {reading.session}.mean(value, weight=samples)",
        )


def _combines(reading: Reading, loop: LoaderLoop) -> bool:
    """Whether figures are combined over workers: in the loop's function, or in those that call it."""
    scopes = [reading.tree.scope(loop.node)]
    for scope in scopes:
        if isinstance(scope, ast.Module) or len(scopes) > 4:
            continue
        scopes += [
            one for call in reading.tree.callers(scope) if (one := reading.tree.scope(call)) not in scopes
        ]
    functions = [one for one in scopes if not isinstance(one, ast.Module)]
    bodies = [statement for one in functions for statement in one.body] or reading.tree.module.body
    return any(
        isinstance(node, ast.Call) and _is_combining(reading, node) for node in reading.tree.run_by(*bodies)
    )


def _is_combining(reading: Reading, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in COMBINES:
        return False
    name = reading.tree.name(call.func)
    return (
        name.startswith("torch.distributed.")
        or reading.is_session(call.func.value)
        or call.func.attr == "compute"
    )
