"""Takes models out of DistributedDataParallel and DataParallel."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from echelon.adapt.changes import Change, Remove, Replace
from echelon.adapt.finding import ScriptFinding
from echelon.adapt.reading import Reading
from echelon.adapt.rule import AdaptRule
from echelon.adapt.things import CONVERTERS, DISTRIBUTED, WRAPPERS, Variable

_WHY = "prepare reduces gradients itself; both would do it"
_NORM = "prepare takes BatchNorm statistics over all workers already"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrappers(AdaptRule):
    """DistributedDataParallel(model), DataParallel(model), model.module and model.no_sync()."""

    name: ClassVar[str] = "wrappers"

    def look(self, reading: Reading) -> Iterator[ScriptFinding]:
        """One finding per wrapper and per use of one."""
        if reading.flavour not in ("plain", "ddp"):
            return
        wrapped: set[Variable] = set()
        for call in reading.tree.calls(*WRAPPERS, *CONVERTERS):
            if call.args:
                yield self._unwrapped(reading, call)
            for variable in reading.things.variables:
                if any(binding.value is call for binding in variable.bindings):
                    wrapped.add(variable)
        yield from self._local_norms(reading)
        for node in reading.tree.nodes:
            if isinstance(node, ast.Attribute) and reading.things.find(node.value) in wrapped:
                yield from self._used(reading, node)

    def _unwrapped(self, reading: Reading, call: ast.Call) -> ScriptFinding:
        inner = reading.text.of(call.args[0])
        statement = reading.tree.statement(call)
        change: Change = Replace(call, inner)
        targets = statement.targets if isinstance(statement, ast.Assign) and statement.value is call else []
        if [reading.text.of(target) for target in targets] == [inner]:
            change = Remove(statement)
        norm = reading.tree.callee(call) in CONVERTERS
        what = f"{reading.source(call.func)} wraps the model"
        return reading.say(self.name, call, "change", what, _NORM if norm else _WHY, "left out", (change,))

    def _local_norms(self, reading: Reading) -> Iterator[ScriptFinding]:
        """DistributedDataParallel leaves BatchNorm to each worker, unless layers are converted."""
        call = next(reading.tree.calls(*DISTRIBUTED), None)
        names = [reading.tree.callee(node) for node in reading.tree.nodes]
        norms = any("BatchNorm" in name or name.startswith("torchvision.models.") for name in names)
        if call is not None and norms and not CONVERTERS & set(names):
            what = "BatchNorm layers were normalised over each worker's own samples"
            why = "prepare takes statistics over all workers' samples, as one process would"
            fix = 'prepare(..., batchnorm="local") keeps the way of DistributedDataParallel'
            yield reading.say(self.name, call, "note", what, why, fix)

    def _used(self, reading: Reading, node: ast.Attribute) -> Iterator[ScriptFinding]:
        outer = next(reading.tree.parents(node))
        if node.attr == "module":
            new = reading.text.of(node.value)
            what = f"{reading.source(node)} unwraps the model"
            why = "a prepared model is the model itself"
            yield reading.say(self.name, node, "change", what, why, new, (Replace(node, new),))
        elif node.attr == "no_sync" and isinstance(outer, ast.Call):
            new = f"{reading.session}.accumulate()"
            what = f"{reading.source(outer)} keeps gradients on this worker"
            why = "the session does this for all prepared models"
            yield reading.say(self.name, outer, "change", what, why, new, (Replace(outer, new),))
        elif node.attr == "require_backward_grad_sync" and isinstance(node.ctx, ast.Store):
            what = "require_backward_grad_sync is set"
            why = "a prepared model does not know it: every backward pass reduces, right but slower"
            fix = f"with {reading.session}.accumulate(not last): loss.backward()"
            yield reading.say(self.name, node, "note", what, why, fix)
